"""Our own rollout engine, for one device: `NativeEngine`, and `load_folder` to fill it from safetensors."""

from tranship.rollout.native.engine import NativeEngine
from tranship.rollout.native.folder import load_folder

__all__ = ["NativeEngine", "load_folder"]

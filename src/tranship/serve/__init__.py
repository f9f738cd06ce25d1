"""The OpenAI-compatible endpoint over a rollout engine. Knows engines by their protocol, and no stage of a run."""

from tranship.serve.load import EngineSettings, Loaded, load_served
from tranship.serve.server import Address, read_token, serve

__all__ = ["Address", "EngineSettings", "Loaded", "load_served", "read_token", "serve"]

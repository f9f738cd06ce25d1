"""vLLM as a rollout engine: `VllmEngine`. vllm itself is imported when an engine is made, and not before."""

from tranship.rollout.vllm.engine import VllmEngine

__all__ = ["VllmEngine"]

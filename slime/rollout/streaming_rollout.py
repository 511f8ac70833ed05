"""The streaming generate function under its short name."""

from slime.rollout.sglang_streaming_rollout import generate_streaming

__all__ = ["generate_streaming"]

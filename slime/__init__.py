"""slime trains language models with reinforcement learning, on a laptop CPU or on a GPU cluster."""

from typing import TYPE_CHECKING, Any

from slime import moved

if TYPE_CHECKING:
    from slime.api import Result, distill, dpo, evaluate, reward_model, sft, train
    from slime.utils.types import Sample

_FROM_API = ("Result", "distill", "dpo", "evaluate", "reward_model", "sft", "train")
__all__ = ["Result", "Sample", "distill", "dpo", "evaluate", "reward_model", "sft", "train"]

__version__ = "0.4.0.dev0"

moved.install()


def __getattr__(name: str) -> Any:
    """Load the public names on first use: a misspelt flag need not wait for their imports."""
    if name == "Sample":
        from slime.utils.types import Sample

        return Sample
    if name in _FROM_API:
        from slime import api

        return getattr(api, name)
    raise AttributeError(f"module 'slime' has no attribute {name!r}")

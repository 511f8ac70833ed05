"""slime: an LLM post-training framework for RL scaling; the same
program runs on a laptop CPU and on a cluster.
"""

from typing import TYPE_CHECKING, Any

from slime import moved

if TYPE_CHECKING:
    from slime.api import Result, train
    from slime.utils.types import Sample

__all__ = ["Result", "Sample", "train"]

__version__ = "0.3.0"

moved.install()


def __getattr__(name: str) -> Any:
    """The public names, loaded when asked for: a misspelt flag need not wait for what they bring along."""
    if name == "Sample":
        from slime.utils.types import Sample

        return Sample
    if name in ("Result", "train"):
        from slime import api

        return getattr(api, name)
    raise AttributeError(f"module 'slime' has no attribute {name!r}")

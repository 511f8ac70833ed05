"""slime: an LLM post-training framework for RL scaling; the same
program runs on a laptop CPU and on a cluster.
"""

from typing import Any

from slime import moved

__version__ = "0.1.0"

moved.install()


def __getattr__(name: str) -> Any:
    """`slime.Sample`, loaded when asked for: it brings torch along,
    which a misspelt flag need not wait for.
    """
    if name == "Sample":
        from slime.utils.types import Sample

        return Sample
    raise AttributeError(f"module 'slime' has no attribute {name!r}")

"""slime: an LLM post-training framework for RL scaling; the same program runs on a laptop CPU and on a cluster."""

from slime import moved

__version__ = "0.1.0"

moved.install()

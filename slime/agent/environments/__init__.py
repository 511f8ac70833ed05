"""Environments: what an episode acts in, by `--env`; `protocol` says what one is, `episode` plays it."""

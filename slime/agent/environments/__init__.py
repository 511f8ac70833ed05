"""Environments of `--env`: `protocol` is their interface, `episode` plays them."""

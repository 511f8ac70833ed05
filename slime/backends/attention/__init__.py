"""The attention of training: causal within each document of a packed stream, also over several ranks."""

"""The attention operators of training: causal attention within each document of
a packed stream, and context parallelism.
"""

"""Builds the model for Megatron: selects the modules of its layers, and implements some of them."""

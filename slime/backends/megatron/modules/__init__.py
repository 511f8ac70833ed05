"""The model in Megatron's terms: which modules make up its layers, and those of ours among them."""

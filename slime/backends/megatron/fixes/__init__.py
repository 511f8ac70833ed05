"""What megatron-core 0.16.1 needs mended, and what lets it run without CUDA and TransformerEngine."""

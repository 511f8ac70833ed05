"""Passes flags of SGLang, its router and Megatron through slime's command line, after checking them."""

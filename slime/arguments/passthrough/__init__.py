"""Flags of SGLang, its router and Megatron on slime's command line: split off, checked, passed on."""

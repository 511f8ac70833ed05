"""Flags of other programs on slime's command line: split off, checked against their tables, passed on.

`program.py` is what they share; SGLang's flags start with `--sglang-`, those of its router with `--router-`,
and Megatron's have no prefix.
"""

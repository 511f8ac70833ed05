"""Launches, watches and ends SGLang servers as engines; SGLang itself is never imported here.

SGLang pins its own torch, so it has its own environment, in which `run_server.py` and `build_kernels.py` run.
"""

"""Our own inference engine: a server process with continuous batching for HF causal LMs, on CPU or CUDA.

Read in this order: `engine.py` (one step), `scheduler.py` (who runs), `kv_cache.py` (paged memory and prefix
reuse), `attention.py` and `runner.py` (the forward pass), `sampler.py`, then `engine_thread.py` and
`http_server.py`.
"""

"""SGLang servers as engines: how they are launched, watched and ended. SGLang itself is never imported here.

SGLang pins its own torch, so it lives in an environment of its own;
`launch` runs there, everything else here.
"""

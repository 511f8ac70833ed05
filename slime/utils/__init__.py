"""The toolbox of plug-in authors: types, HTTP, the asyncio loop, loss masks and tokenizers."""

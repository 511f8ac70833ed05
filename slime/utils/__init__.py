"""The plug-in author's toolbox: types, HTTP, the asyncio loop, named waits, loss masks and tokenizers."""

"""Attention of decoding that reads the pages of the KV pool where they lie."""

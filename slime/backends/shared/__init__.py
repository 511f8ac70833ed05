"""Shared code of both trainers: their base class, learning rates, HF folders and copies of weights."""

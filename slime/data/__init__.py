"""Prompts: reading files, turning rows into samples, and the order in which an epoch visits them."""

"""Prompts: reads files, turns rows into samples, and orders them in each epoch."""

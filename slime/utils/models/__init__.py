"""Reads the folder of a model: its config, its tensors under hub names, its number formats."""

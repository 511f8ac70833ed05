"""What the folder of a model holds: its config, its tensors under hub names, its number formats."""

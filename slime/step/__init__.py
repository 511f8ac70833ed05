"""The training step: what one batch goes through, from its first pass to the optimizer. Begin at training_step.py."""

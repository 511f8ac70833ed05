"""The training step: what one batch goes through, to the optimizer and its metrics; see training_step.py."""

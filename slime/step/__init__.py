"""The training step, from a batch to the optimizer update and its metrics; see training_step.py."""

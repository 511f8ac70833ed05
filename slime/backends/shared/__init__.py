"""What both trainers use: their base class, micro-batches, learning rates, HF folders, copies of weights."""

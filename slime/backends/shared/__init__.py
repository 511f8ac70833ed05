"""What both trainers use: their base class, micro-batches, the optimizer, HF folders, copies of weights."""

"""From samples to train data: convert, validate, split into steps, balance over ranks, pack into micro-batches."""

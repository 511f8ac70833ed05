"""From samples to train data: convert, validate, split into steps, balance over ranks and micro-batches."""

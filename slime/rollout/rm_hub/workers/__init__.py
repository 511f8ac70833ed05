"""Worker processes that compare an answer with its reference, each comparison under limits and a deadline."""

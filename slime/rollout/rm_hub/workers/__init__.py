"""Worker processes that compare a response with its reference, within limits and a deadline."""

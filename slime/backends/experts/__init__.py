"""Computes the experts of a layer as one operator: tokens sorted by expert, grouped matrix products."""

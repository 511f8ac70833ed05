"""Filling a training batch: which groups are kept, returned or given up, and how old their tokens are."""

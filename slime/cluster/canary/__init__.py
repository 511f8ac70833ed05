"""Periodically scores fixed texts on trainer and engines, to check that both hold the same weights."""

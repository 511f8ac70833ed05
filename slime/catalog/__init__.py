"""Closed lists: each choice of a flag is a row with its traits and the place of its code."""

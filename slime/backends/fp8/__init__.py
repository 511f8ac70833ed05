"""Computes the matrix products of linear layers in FP8, with dynamic scaling, forward and backward."""

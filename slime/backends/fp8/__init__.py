"""Matrix products of linear layers in FP8: values scaled as they come, forward and backward."""

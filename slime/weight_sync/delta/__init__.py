"""Publishes weight versions as deltas in a folder, and updates local copies from them."""

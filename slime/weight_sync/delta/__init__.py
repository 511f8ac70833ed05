"""Only what changed: weight versions published as deltas in a folder, and the copies that follow it."""

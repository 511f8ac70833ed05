"""Weight versions published as deltas in a folder, only what changed, and the copies that follow it."""

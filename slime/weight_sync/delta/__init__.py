"""Only what changed: versions of the weights published as deltas in
a folder, and the copies that follow it.
"""

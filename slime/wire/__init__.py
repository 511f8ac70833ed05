"""The HTTP contract between slime and its inference engines: typed
values, a client, one worker's control plane.
"""

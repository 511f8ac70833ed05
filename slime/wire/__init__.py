"""The HTTP contract between slime and inference engines: typed values, a client, a worker's control plane."""

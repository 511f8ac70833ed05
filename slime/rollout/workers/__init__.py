"""Rollout workers: processes in which generate functions, rewards and parsing run (--rollout-workers)."""

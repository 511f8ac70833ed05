"""Restarts a trainer that lost a rank, while engines and rollouts keep working."""

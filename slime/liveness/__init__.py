"""Finds out whether a run is alive: waits with deadlines, heartbeats, hang reports and stacks."""

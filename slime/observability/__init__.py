"""Logging, metric trackers, timers, traces and the arithmetic of metrics."""

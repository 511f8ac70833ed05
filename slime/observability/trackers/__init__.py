"""Trackers (TensorBoard, W&B, trackio, MLflow): each reads the run's folder in a process of its own."""

"""Transports that send named weights from the trainer to the engines, one per file."""

"""Ways to bring named weights from the trainer to the engines, one transport per file."""

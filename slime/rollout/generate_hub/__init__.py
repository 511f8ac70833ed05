"""Generate functions to name in --custom-generate-function-path."""

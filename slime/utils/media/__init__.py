"""Reads pictures of prompts from whatever a row holds, and prepares them for models."""

"""Requests tokens from engines: builds requests, limits how many are in flight, and aborts them."""

"""Starts and watches inference engines (processes that serve the wire protocol), and routes requests."""

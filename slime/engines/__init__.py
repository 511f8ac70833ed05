"""Inference engines: processes that serve the wire protocol; how they are started, grouped and routed to."""

"""Inference engines: processes that serve the wire protocol, and how
they are started, grouped and routed to.
"""

"""Served models: how their engines are started, the fleet that keeps them
alive, the address before them, their weights.
"""

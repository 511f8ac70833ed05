"""Served models: how their engines start, the fleet that keeps them alive, their addresses and weights."""

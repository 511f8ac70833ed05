"""Registries: each choice of a flag is a row with its properties and the location of its code."""

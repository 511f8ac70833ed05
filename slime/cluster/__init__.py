"""Wires the stages of slime together and places them on processes and
machines; the only folder that knows Ray.
"""

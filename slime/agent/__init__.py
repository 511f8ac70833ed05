"""Agents: episodes of many turns, recorded token by token, of any program that speaks a chat protocol."""

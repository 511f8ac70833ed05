"""Agents: multi-turn episodes, recorded token by token, of any program that speaks a chat API."""

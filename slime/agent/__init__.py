"""Agents: records multi-turn episodes, token by token, of any program that uses a chat API."""

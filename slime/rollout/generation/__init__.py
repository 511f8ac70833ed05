"""Asking the engines for tokens: what a request holds, how many are in flight, and how they are aborted."""

"""Simulates a run on a virtual clock: the real loop, buffer and ledger with modelled engines and trainers."""

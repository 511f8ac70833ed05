"""A run on a virtual clock: the real loop, buffer and ledger over modelled engines and trainers."""

"""Rewards that run programs or ask a model; `slime/catalog/rewards.py` names them by path."""

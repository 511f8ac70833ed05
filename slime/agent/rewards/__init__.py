"""Rewards that run programs or ask a judge model; `slime/catalog/rewards.py` names them by path."""

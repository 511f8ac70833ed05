"""The training step: what one batch goes through, from reference
log-probs over advantages to optimizer steps.
"""

"""The flags, a file per subject: their declarations, when each has an effect, and the rules that span several.

The order in which the rules run stands in slime/arguments/rules.py.
"""

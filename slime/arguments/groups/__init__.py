"""The flags, a file per subject: declarations, when each has an effect, and rules that span several.

The order in which the rules run stands in slime/arguments/rules.py.
"""

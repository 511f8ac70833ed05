"""Closed lists of what a flag can choose, one row each and free of torch:
what it needs, and where its function lives.

Flags read their choices from here, rules read the traits, and the code resolves the function of a row when it
is used. So a new estimator or policy loss is a function and a row.
"""

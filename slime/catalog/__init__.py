"""Closed lists of what a flag can choose: each choice is a row that says what it needs and where its code is.

Flags read their choices from here, rules read the traits, and the code resolves the function of a row when it
is used. So a new estimator, policy loss, reward or format of prompt files is a function and a row.
"""

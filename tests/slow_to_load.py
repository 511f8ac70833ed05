"""A module with a `warm_up`, as the checks have whose imports take
long: a check worker keeps a copy of it.
"""

import os


def warm_up():
    pass


def parent_pid():
    return os.getppid()


def add(left, right):
    return left + right


def compute_for_ever():
    while True:
        pass

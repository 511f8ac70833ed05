"""A module with a `warm_up`, as checks with slow imports have: a check worker keeps a copy of it."""

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

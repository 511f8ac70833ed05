"""Settings of the whole suite: generated examples are the same in
every run, so that a red run can be repeated.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True)
# `pytest --hypothesis-profile default` looks further, with new examples each time.
settings.load_profile("repeatable")

"""Parameters of tests that run in a kind of sandbox."""

import pytest

from slime.agent.sandbox.isolation import why_not


def usable(kind):
    """The kind as a parameter that is skipped on machines where it does not work."""
    why = why_not(kind)
    return pytest.param(
        kind, marks=pytest.mark.skipif(why is not None, reason=f"{kind} does not work here: {why}")
    )

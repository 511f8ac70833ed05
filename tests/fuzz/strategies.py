"""What fuzzed tests share: values of any kind, objects that are nearly right, files that were damaged."""

from collections.abc import Callable

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_NUMBERS = st.one_of(
    st.integers(-3, 300),
    st.floats(),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e-320, 1e308]),
)
SCALARS = st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=20))
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


def few(num_examples: int) -> Callable:
    """`pytest --hypothesis-profile default` draws others; the numbers of `make test` are small."""
    return settings(
        max_examples=num_examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
    )


def nearly(**plausible: st.SearchStrategy) -> st.SearchStrategy[dict]:
    """Objects with these fields, each as it should be, or anything, or missing."""
    return st.fixed_dictionaries({}, optional={k: st.one_of(v, ANYTHING) for k, v in plausible.items()})


def damaged(whole: bytes) -> st.SearchStrategy[bytes]:
    """A file that was cut, changed in a few bytes, grown, or is none at all."""
    place = st.integers(0, max(0, len(whole) - 1))

    def changed(changes: list[tuple[int, int]]) -> bytes:
        data = bytearray(whole)
        for position, value in changes:
            data[position] = value
        return bytes(data)

    return st.one_of(
        place.map(lambda end: whole[:end]),
        st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=4).map(changed),
        st.lists(
            st.tuples(st.integers(0, min(200, len(whole) - 1)), st.integers(0, 255)), min_size=1, max_size=4
        ).map(changed),
        st.tuples(place, st.binary(min_size=1, max_size=40)).map(
            lambda t: whole[: t[0]] + t[1] + whole[t[0] :]
        ),
        st.binary(max_size=300),
    )

"""A sandbox reports at its start which limits hold."""

import logging

import pytest

from slime.agent.sandbox import isolation


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (isolation.BUBBLEWRAP, "resident memory, page tables and sockets are counted"),
        (isolation.NAMESPACES, "resident memory, page tables and sockets are counted"),
        (isolation.PLAIN, "not limited: memory of sockets, disk, number of files, user namespaces"),
    ],
)
def test_the_log_names_the_limits_of_each_kind_once(kind, expected, caplog):
    isolation.report_start.cache_clear()
    with caplog.at_level(logging.INFO):
        isolation.report_start(kind)
        isolation.report_start(kind)
    assert caplog.text.count(expected) == 1

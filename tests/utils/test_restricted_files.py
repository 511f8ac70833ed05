"""Logs and the record of a run hold prompts and responses: others on the machine cannot read them."""

import logging
import os
import stat

import pytest

from slime.cli.main import user_errors
from slime.observability.terminal.capture import Capture, log_to
from slime.record import RecordWriter
from slime.utils.machine.children import open_log


@pytest.fixture
def no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


def write_log_of_a_process(path):
    with open_log(path, "engine-0"):
        pass


def write_log_of_the_driver(path):
    with log_to(path):
        logging.getLogger("slime").warning("a prompt")


def write_captured_output(path):
    with Capture() as capture, capture.into(path):
        print("a prompt")


def write_traceback(path):
    with pytest.raises(SystemExit), user_errors(path):
        raise ValueError("a prompt")


WRITERS = [write_log_of_a_process, write_log_of_the_driver, write_captured_output, write_traceback]


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("existed", [False, True])
def test_a_log_is_readable_by_the_user_and_the_group_alone(tmp_path, no_umask, write, existed):
    file = tmp_path / "logs" / "one.log"
    if existed:  # written by an earlier version
        file.parent.mkdir()
        file.write_text("")
        file.chmod(0o644)
    write(file)
    assert mode(file) == 0o640 and mode(file.parent) == 0o777
    os.umask(0o077)
    write(file.with_name("two.log"))
    assert mode(file.with_name("two.log")) == 0o600


@pytest.mark.parametrize("existed", [False, True])
def test_the_record_is_readable_by_the_user_and_the_group_alone(tmp_path, no_umask, existed):
    if existed:
        RecordWriter(tmp_path / "record.db", "run-1", 1 << 20).close()
        (tmp_path / "record.db").chmod(0o644)
    writer = RecordWriter(tmp_path / "record.db", "run-1", 1 << 20)
    try:
        files = sorted(tmp_path.glob("record.db*"))
        assert len(files) >= 2 and {mode(file) for file in files} == {0o640}
    finally:
        writer.close()

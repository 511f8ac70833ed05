"""Evictions, restarts and errors of a run are kept in its folder and shown by `slime status`."""

import logging
import os
import time

from slime.cli.inspect.status import status_main
from slime.observability.incidents import INCIDENTS_FILE, keeping_incidents, read_incidents
from slime.utils.files.run_file import open_run_file


def test_evictions_and_restarts_are_shown_by_status_and_other_warnings_are_not(tmp_path, capsys):
    open_run_file(tmp_path, {}, None, None, None)
    with keeping_incidents(tmp_path):
        logging.getLogger("slime.engines.fleet").error("engine-1 is evicted: no such file\nsecond line")
        logging.getLogger("slime.engines.fleet").warning("engine-1 was killed by signal 9\nrestarting it")
        logging.getLogger("slime.step").warning("a metric is odd")
        logging.getLogger("some.library").error("CUDA error")
    logging.getLogger("slime.engines.fleet").error("after the run")
    assert [one.level for one in read_incidents(tmp_path)] == ["ERROR", "WARNING", "ERROR"]
    assert status_main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "evictions, restarts and errors: 3" in shown
    assert "error: engine-1 is evicted: no such file" in shown and "signal 9" in shown
    assert "CUDA error" in shown and "odd" not in shown and "after the run" not in shown
    assert (os.stat(tmp_path / INCIDENTS_FILE).st_mode & 0o007) == 0, "not for other users"


def test_a_line_that_was_cut_short_and_what_an_earlier_start_left_are_passed_over(tmp_path):
    with keeping_incidents(tmp_path):
        logging.getLogger("slime").error("of an earlier start")
    now = time.time()
    (tmp_path / INCIDENTS_FILE).open("a").write('{"time": 1, "lev')
    assert len(read_incidents(tmp_path)) == 1 and read_incidents(tmp_path, since=now + 1) == []
    assert read_incidents(tmp_path / "nowhere") == []

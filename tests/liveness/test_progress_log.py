"""A long wait says how far it is."""

import logging
import threading

from slime.liveness import waits


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages, self.two = [], threading.Event()

    def emit(self, record):
        self.messages.append(record.getMessage())
        if len(self.messages) >= 2:
            self.two.set()


def test_a_long_wait_tells_its_state_again_and_again_until_it_ends(monkeypatch):
    records, states = Records(), iter(["1 of 8 ranks", *["2 of 8 ranks"] * 10_000])
    monkeypatch.setattr(waits.logger, "level", logging.INFO)
    waits.logger.addHandler(records)
    try:
        with waits.logging_progress(lambda: next(states), interval_s=0.01):
            assert records.two.wait(60)
        told = len(records.messages)
        assert records.messages[0].startswith("1 of 8 ranks after ") and "2 of 8" in records.messages[1]
        assert not [thread for thread in threading.enumerate() if thread.name == "progress-log"]
        assert len(records.messages) == told
    finally:
        waits.logger.removeHandler(records)


def test_a_short_wait_is_silent(caplog):
    with caplog.at_level(logging.INFO), waits.logging_progress(lambda: "never told"):
        pass
    assert caplog.text == ""

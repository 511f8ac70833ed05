"""What stands beside the answers in a record: spans, actions, pieces of text, advantages; older files."""

import base64
import contextlib
import io
import sqlite3
from dataclasses import replace

import pytest
from PIL import Image

from slime.liveness import waits
from slime.observability.tracer import Span, spans_of_samples, spans_of_waits, write_spans
from slime.record import RecordWriter, group_entries
from slime.record.actions import ask, forget_replied, read_actions, write_reply
from slime.record.additions import (
    Advantage,
    PieceBook,
    read_advantage,
    read_histogram,
    write_advantages,
    write_histograms,
)
from slime.record.images import read_images
from slime.utils.types import Sample

MIB = 1 << 20


def make_sample(index, reward=1.0, **more):
    return Sample(
        group_index=index // 2,
        index=index,
        prompt="2+2=",
        tokens=[5, 6, 7],
        response="4!",
        response_length=2,
        reward=reward,
        status=Sample.Status.COMPLETED,
        **more,
    )


def write(path, samples=(), *work):
    writer = RecordWriter(path / "record.db", "run-1", 64 * MIB)
    if samples:
        writer.add("train", 0, group_entries([[s] for s in samples], "trained"))
    for act in work:
        writer.submit("a test", act)
    writer.close()


def rows(path, query):
    with sqlite3.connect(path / "record.db") as connection:
        return connection.execute(query).fetchall()


def test_an_action_is_asked_for_and_answered_in_its_row(tmp_path):
    write(tmp_path)
    ask(tmp_path, "lr", 1e-4, "page")
    [row] = read_actions(tmp_path, None)
    done = replace(row, state="done", rollout_id=7, reply="1e-06 -> 0.0001")
    write(tmp_path, (), lambda c: write_reply(c, tmp_path, done))
    assert read_actions(tmp_path, None) == [done], "other hosts see the reply before they see the record"
    with sqlite3.connect(tmp_path / "record.db") as connection:
        forget_replied(connection, tmp_path)
        assert read_actions(tmp_path, connection) == [done]
    assert read_actions(tmp_path, None) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [("lr", None), ("lr", -1.0), ("lr", float("nan")), ("pause", 1.0), ("format_disk", None)],
)
def test_what_nobody_could_answer_is_not_written(tmp_path, name, value):
    write(tmp_path)
    with pytest.raises(ValueError):
        ask(tmp_path, name, value, "page")
    assert read_actions(tmp_path, None) == []


def test_advantages_are_found_by_the_index_of_the_sample(tmp_path):
    advantages = [Advantage(0, 0.5), Advantage(1, -0.5, [-1.0, 0.0]), Advantage(99, 1.0)]
    write(tmp_path, list(map(make_sample, range(3))), lambda c: write_advantages(c, 0, advantages))
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        found = [read_advantage(connection, row) for row in (1, 2, 3)]
    assert found == [Advantage(0, 0.5), Advantage(1, -0.5, [-1.0, 0.0]), None]


def test_the_text_of_a_token_is_asked_for_once(tmp_path):
    asked = []

    def pieces(ids):
        asked.append(list(ids))
        return [f"<{i}>" for i in ids]

    book = PieceBook(pieces)
    more = make_sample(1)
    more.tokens = [7, 8]
    write(tmp_path, (), lambda c: book.write(c, [make_sample(0)]), lambda c: book.write(c, [more]))
    assert asked == [[5, 6, 7], [8]]
    assert rows(tmp_path, "SELECT * FROM pieces") == [(5, "<5>"), (6, "<6>"), (7, "<7>"), (8, "<8>")]


def test_spans_of_samples_are_read_from_their_traces(tmp_path):
    from slime.observability.tracer import trace_span

    samples = [make_sample(0), make_sample(1)]
    with trace_span(samples[0], "generate", {"x": 1}) as span:
        span.update({"completion_tokens": 2})
    with trace_span(samples, "group_reward_model"):
        pass
    found = spans_of_samples(3, samples)
    assert [(s.lane, s.name) for s in found] == [("engines", "sample 0"), ("reward", "group 0")]
    assert found[0].about["completion_tokens"] == 2 and found[0].end >= found[0].start
    write(tmp_path, (), lambda c: write_spans(c, [*found, Span(3, "loop", "training", 1.0, 2.0)]))
    assert [r[0] for r in rows(tmp_path, "SELECT lane FROM spans")] == ["engines", "reward", "loop"]


def test_bars_of_answers_lie_in_the_lane_of_their_engine():
    samples = []
    for index, engine in enumerate(["engine-1", None]):
        about = {"tokens": 3, **({"engine": engine} if engine else {})}
        sample = make_sample(index)
        span = {"name": "generate", "start": 10.0, "end": 12.0, "about": about}
        sample.__dict__["trace"] = {"spans": [span]}
        samples.append(sample)
    found = spans_of_samples(4, samples)
    assert [(span.lane, span.name) for span in found] == [("engine-1", "sample 0"), ("engines", "sample 1")]
    assert found[0].about == {"sample": 0, "group": 0, "tokens": 3}


def test_waits_that_took_a_while_have_a_lane_of_whoever_waited(monkeypatch):
    monkeypatch.setattr(waits, "_SHORT_S", 0.0)
    with waits.waiting("before anybody asked", owner="rollout"):
        pass
    waits.drain_ended()
    waits.know_as("http://127.0.0.1:1", "engine-0")
    with waits.waiting("a group", owner="rollout"), waits.waiting("training", owner="run"):
        pass
    with waits.waiting("POST http://127.0.0.1:1/pause", owner="driver", target="http://127.0.0.1:1"):
        pass
    with waits.waiting("POST http://127.0.0.1:1/generate (request 7)", owner="driver"):
        pass  # it is a bar of the engine
    with waits.waiting("health", owner="driver", moves=False):
        pass
    found = {(span.lane, span.name, span.about.get("for")) for span in spans_of_waits(3)}
    assert found == {("waits: rollout", "a group", None), ("waits: driver", "POST /pause", "engine-0")}
    assert spans_of_waits(3) == []


def test_histograms_of_ranks_are_added_up_and_replaced_by_a_repeated_step(tmp_path):
    first, other = [0] * 21, [0] * 21
    first[10], other[10], other[20] = 5, 2, 1
    parts = [{"ratio": first}, {"ratio": other, "entropy": [1] * 24}, {}]
    again = [{"ratio": first}]
    write(
        *(tmp_path, [make_sample(0)]),
        lambda connection: write_histograms(connection, 0, parts),
        lambda connection: write_histograms(connection, 1, parts),
        lambda connection: write_histograms(connection, 1, again),
    )
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        added, replaced, none = read_histogram(connection, "ratio", [0, 1, 2])
        assert (added[10], added[20], sum(added)) == (7, 1, 8) and replaced == first and none == [0] * 21
        assert read_histogram(connection, "entropy", [0]) == [[1] * 24]


def test_a_record_from_before_histograms_and_images_is_read_and_continued(tmp_path):
    write(tmp_path, [make_sample(0)])
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection, connection:
        connection.execute("DROP TABLE histograms")
        connection.execute("DROP TABLE images")
        assert read_histogram(connection, "ratio", [0]) == [[0] * 21] and read_images(connection, 1, 1) == []
    write(tmp_path, [make_sample(0)], lambda c: write_histograms(c, 0, [{"ratio": [1] * 21}]))
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        assert read_histogram(connection, "ratio", [0]) == [[1] * 21]


def images_in(path):
    """Return the size of each image of every sample, by its row."""
    with contextlib.closing(sqlite3.connect(path / "record.db")) as connection:
        rows = connection.execute("SELECT group_row, id FROM samples ORDER BY id").fetchall()
        found = [read_images(connection, *row) for row in rows]
        [(stored,)] = connection.execute("SELECT count(*) FROM images").fetchall()
    opened = [
        [url and Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        for urls in found
    ]
    return [[picture and (picture.format, picture.size) for picture in urls] for urls in opened], stored


def test_images_of_samples_are_kept_small_and_once_for_those_that_share_them(tmp_path):
    small, large = Image.new("RGBA", (28, 20), "red"), Image.new("RGB", (2000, 1000), "blue")
    shows = [[small], [small], [small, large], [], ["http://example.com/a.png", b"GIF89a"], [small]]
    samples = [make_sample(i, multimodal_inputs={"images": shown}) for i, shown in enumerate(shows)]
    for sample in samples:
        sample.group_index = 0
    writer = RecordWriter(tmp_path / "record.db", "run-1", 64 * MIB)
    writer.add("train", 0, group_entries(samples, "trained"))
    writer.add("train", 1, group_entries([make_sample(9, multimodal_inputs="nonsense")], "trained"))
    writer.close()
    png, jpeg = ("PNG", (28, 20)), ("JPEG", (512, 256))
    found, stored = images_in(tmp_path)
    assert found == [[png], [png], [png, jpeg], [], [None, None], [png], []] and stored == 7
    write(tmp_path, [make_sample(20)])  # takes the place of the first rollout
    assert images_in(tmp_path) == ([[], []], 0)


@pytest.mark.parametrize(
    "data", [b"<svg onload=alert(1)>", "text", b"\x89PNG\r\n\x1a\n" + bytes(1 << 20), b"GIF89a", None]
)
def test_only_a_png_or_a_jpeg_of_a_modest_size_is_given_to_a_browser(tmp_path, data):
    def insert(connection):
        connection.execute("INSERT INTO images VALUES (1, 0, 0, ?)", (data or b"\xff\xd8\xff",))

    write(tmp_path, [make_sample(0)], insert)
    with contextlib.closing(sqlite3.connect(tmp_path / "record.db")) as connection:
        [url] = read_images(connection, 1, 1)
    assert url == (None if data is not None else "data:image/jpeg;base64,/9j/")

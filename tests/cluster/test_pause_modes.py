"""What becomes of requests in flight when weights are pushed: which of three ways a run takes."""

import pytest

from slime.arguments import parse_args
from slime.catalog.engines import ENGINES
from slime.cluster.serving.engine_weights import pause_mode
from slime.wire.protocol import EngineInfo

EMBEDDED = EngineInfo(ENGINES["embedded"].dialect, "model", "run:1", None, None, {})
SILENT = EngineInfo(ENGINES["sglang"].older_dialects[0][1], "model", "run:1", None, None, {})


@pytest.mark.parametrize(
    ("asked", "taken"),
    [("auto", "retract"), ("retract", "retract"), ("in_place", "in_place"), ("abort",) * 2],
)
def test_an_engine_that_names_versions_does_what_is_asked(asked, taken):
    assert EMBEDDED.dialect.has_spans and pause_mode(asked, EMBEDDED) == taken


@pytest.mark.parametrize("asked", ["auto", "retract", "in_place", "abort"])
def test_requests_come_back_where_versions_are_not_told_or_cannot_be_kept(asked):
    assert not SILENT.dialect.has_spans and pause_mode(asked, SILENT) == "abort"
    assert pause_mode(asked, EMBEDDED, keep=False) == "abort"


def test_in_place_is_refused_where_old_prefixes_would_stay(tmp_path):
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"input": "a", "label": "b"}\n')
    words = (
        f"--hf-checkpoint none --prompt-data {data} --rm-type math --rollout-batch-size 4 --num-rollout 3 "
    )
    words += "--n-samples-per-prompt 2 --rollout-max-response-len 8 --pause-generation-mode in_place"
    assert parse_args(words.split()).pause_generation_mode == "in_place"
    external = f"{words} --rollout-engine sglang --rollout-external-engine-addrs 127.0.0.1:9"
    with pytest.raises(ValueError, match="--pause-generation-mode in_place with SGLang"):
        parse_args(external.split())

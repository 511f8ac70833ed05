"""Readers of files that people, disks and strangers damage: what cannot be read is told in a sentence.

No crash, no hang, no memory without bound; `pytest --hypothesis-profile default tests/fuzz` looks further.
"""

import json
import resource
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from page_world import make_run
from safetensors.torch import save_file

from slime.arguments.core.files import read_yaml_mapping
from slime.cluster.checkpoints.checkpoint import ROLLOUT, read_state, write_state
from slime.data.prompt_sources import read_file
from slime.observability.tracking import read_metrics
from slime.record import LedgerReader, Record, Select
from slime.record.audit import audit
from slime.rollout.dumps import load_rollout_dump, save_rollout_dump
from slime.utils import codec
from slime.utils.files.run_file import read_run
from slime.utils.files.safetensors_files import INDEX, files_by_tensor, read_tensors
from slime.utils.files.step_folders import Manifest, find_step
from slime.utils.files.torch_dist_folder import find_iteration
from slime.utils.types import Sample
from tests.fuzz.strategies import ANYTHING, damaged, few, nearly

MOST_BYTES = 768 << 20  # that any of these files may cost
TOLD = (ValueError, OSError)


@pytest.fixture(autouse=True)
def _memory_is_bounded():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    assert grown < MOST_BYTES, f"{grown >> 20} MiB for a small file"


def told(read, *args):
    """What was read; None: why not was told, and in few words."""
    try:
        return read(*args)
    except TOLD as error:
        assert 0 < len(str(error)) < 5000, str(error)[:300]
        return None


def _table(**columns):
    import io

    import pyarrow
    import pyarrow.parquet

    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out)
    return out.getvalue()


ROWS = [{"input": f"say {i} é", "label": str(i), "metadata": {"deep": [1, {"a": None}]}} for i in range(3)]
PROMPTS = {
    "prompts.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode(),
    "prompts.json": json.dumps(ROWS).encode(),
    "prompts.csv": b'input,label\n"say ""a"", then b",1\nsay b,2\n',
    "prompts.tsv": b"input\tlabel\nsay a\t1\n",
}


@pytest.mark.parametrize("name", [*PROMPTS, "prompts.parquet"])
def test_damaged_prompts_are_rows_or_a_sentence(tmp_path, name):
    if name == "prompts.parquet":
        pytest.importorskip("pyarrow", reason="parquet needs pyarrow: pip install slime-rl[data]")
        whole = _table(input=["say a", "say b"], label=["1", "2"], numbers=[[1, 2], [3]])
    else:
        whole = PROMPTS[name]
    path = tmp_path / name

    @few(60)
    @given(data=damaged(whole))
    def check(data):
        path.write_bytes(data)
        rows = told(lambda: list(read_file(str(path))))
        assert rows is None or all(isinstance(row, dict) for row in rows)

    check()


YAML = b"lr: 1e-6\nrollout_batch_size: 4\nnested: &x {a: [1, 2]}\nagain: *x\n# a comment\ntext: 'quoted'\n"


def test_a_damaged_config_is_a_mapping_or_a_sentence_with_its_flag(tmp_path):
    path = tmp_path / "run.yaml"

    @few(60)
    @given(data=st.one_of(damaged(YAML), ANYTHING.map(lambda value: json.dumps(value).encode())))
    def check(data):
        path.write_bytes(data)
        try:
            assert isinstance(read_yaml_mapping(str(path), "--config"), dict)
        except ValueError as error:
            assert "--config" in str(error) and len(str(error)) < 5000

    check()


@pytest.mark.parametrize("text", ["[" * 1200, "a: " + "[" * 1200, "- " * 1200])
def test_a_config_without_end_is_a_sentence(tmp_path, text):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="--config"):
        read_yaml_mapping(str(path), "--config")


def a_sample():
    return Sample(
        index=1,
        prompt=[{"role": "user", "content": "hi"}],
        tokens=[1, 2, 3],
        response="b",
        response_length=2,
        rollout_log_probs=[-0.5, -1.0],
        version_spans=[("run:1", 0, 2)],
        reward={"a": 1.0},
    )


def test_a_damaged_rollout_dump_is_samples_or_a_sentence(tmp_path):
    whole = save_rollout_dump(f"{tmp_path}/{{rollout_id}}.pt", 0, [a_sample()]).read_bytes()

    @few(60)
    @given(data=damaged(whole))
    def check(data):
        (tmp_path / "0.pt").write_bytes(data)
        samples = told(load_rollout_dump, f"{tmp_path}/{{rollout_id}}.pt", 0)
        assert samples is None or all(isinstance(sample, Sample) for sample in samples)

    check()


FIELDS = {
    "status": st.just("completed"),
    "spec_info": st.just({}),
    "prefix_cache_info": st.just({"cached_tokens": 1}),
    "reward_failure": st.just({"kind": "timeout", "reason": "r"}),
    "version_spans": st.just([["run:1", 0, 1]]),
    "multimodal_inputs": st.none(),
    "image_spans": st.just([[0, 1]]),
    "turn_rewards": st.just([[0, 1.0]]),
    "tokens": st.just([1, 2]),
}


@few(60)
@given(data=st.one_of(nearly(samples=st.lists(nearly(**FIELDS), max_size=2)), ANYTHING))
def test_a_dump_of_anything_is_samples_or_a_sentence(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    torch.save(data, folder / "fuzzed-0.pt")
    samples = told(load_rollout_dump, f"{folder}/fuzzed-{{rollout_id}}.pt", 0)
    assert samples is None or all(isinstance(sample, Sample) for sample in samples)


def test_a_damaged_state_of_a_checkpoint_is_told(tmp_path):
    state = {"offset": 3, "buffer": [{"tokens": [1, 2]}], "array": torch.arange(4)}
    write_state(state, tmp_path / ROLLOUT)
    whole = (tmp_path / ROLLOUT).read_bytes()

    @few(60)
    @given(data=damaged(whole))
    def check(data):
        (tmp_path / ROLLOUT).write_bytes(data)
        told(read_state, tmp_path / ROLLOUT)

    check()


def test_a_damaged_manifest_is_told_and_never_taken(tmp_path):
    folder = tmp_path / "step_0000003"
    folder.mkdir()
    whole = Manifest(3, "run", 4, {}).to_json().encode()

    @few(60)
    @given(data=st.one_of(damaged(whole), ANYTHING.map(lambda value: json.dumps(value).encode())))
    def check(data):
        (folder / "manifest.json").write_bytes(data)
        found = told(find_step, tmp_path)
        # Of what its checksum covers, nothing differs.
        assert found is None or found.manifest.rollout_id == 3 or b'"format_version": 1' in data

    check()


def test_a_damaged_folder_of_megatron_is_told(tmp_path):
    folder = tmp_path / "iter_0000002"
    folder.mkdir()
    (folder / ".metadata").touch()
    whole = json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}).encode()

    @few(80)
    @given(tracker=damaged(b"2"), data=damaged(whole))
    def check(tracker, data):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(tracker)
        (folder / "metadata.json").write_bytes(data)
        told(find_iteration, tmp_path)

    check()


@few(120)
@given(data=damaged(codec.encode({"a": [1, 2, 3, 400], "f": [0.5] * 5, "t": torch.arange(6), "s": ("x",)})))
def test_damaged_bytes_of_the_ledger_are_a_value_or_a_sentence(data):
    told(codec.decode, data)


def test_a_damaged_record_is_read_or_told(tmp_path):
    run = make_run(tmp_path / "run", 2)
    whole = (run / "record.db").read_bytes()

    def look():
        with LedgerReader(run / "record.db") as reader:
            reader.events()
            reader.rollouts_after(-1, "s")
            reader.finished_entries("s")
        with Record(run / "record.db") as record:
            record.rollouts()
            for answer in record.samples(Select(limit=20)):
                record.tokens(answer.row)
        audit(run / "record.db", finished=True)

    @few(80)
    @given(data=damaged(whole))
    def check(data):
        for name in ("record.db-wal", "record.db-shm"):
            (run / name).unlink(missing_ok=True)
        (run / "record.db").write_bytes(data)
        told(look)

    check()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_damaged_folder_of_a_run_is_read_or_told(tmp_path, name):
    run = make_run(tmp_path / "run", 2)
    whole = (run / name).read_bytes()

    @few(120)
    @given(data=st.one_of(damaged(whole), ANYTHING.map(lambda value: json.dumps(value).encode())))
    def check(data):
        (run / name).write_bytes(data)
        told(read_run if name == "run.json" else read_metrics, run)

    check()


def test_a_damaged_model_file_is_told(tmp_path):
    save_file({"a": torch.arange(8.0), "b": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    whole = (tmp_path / "model.safetensors").read_bytes()

    @few(60)
    @given(data=damaged(whole))
    def check(data):
        (tmp_path / "model.safetensors").write_bytes(data)
        told(lambda: dict(read_tensors([tmp_path / name for name in files_by_tensor(tmp_path).values()])))

    check()


@few(60)
@given(
    data=st.one_of(
        ANYTHING.map(lambda value: json.dumps(value).encode()),
        nearly(weight_map=st.just({"a": "../secret"})).map(lambda value: json.dumps(value).encode()),
        damaged(b'{"metadata": {}, "weight_map": {"a": "model-00001-of-00001.safetensors"}}'),
    )
)
def test_an_index_names_files_of_its_folder_or_is_told(tmp_path_factory, data):
    folder: Path = tmp_path_factory.getbasetemp() / "indexed"
    folder.mkdir(exist_ok=True)
    (folder / INDEX).write_bytes(data)
    found = told(files_by_tensor, folder)
    assert found is None or all(Path(name).name == name for name in found.values())

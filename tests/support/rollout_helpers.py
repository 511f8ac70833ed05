"""Arguments, prompt files and a tokenizer folder for rollout tests: real parsing, no model."""

import argparse
import contextlib
import json
import threading
from pathlib import Path
from typing import Any

from fake_engine import FakeEngine
from tiny_model import make_tiny_tokenizer

from slime.arguments import RunInfo, parse_args, plugin_args
from slime.cluster.rollout_workers import RolloutWorkers
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.workers import current


def write_prompts(path: Path, count: int, **columns: Any) -> Path:
    rows = [{"input": f"q{i}", "label": str(i), **columns} for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_args(folder: Path, engine: FakeEngine | None = None, *flags: str, prompts: int = 16, **facts: Any):
    """The namespace that a rollout function gets."""
    return plugin_args(*make_run(folder, engine, *flags, prompts=prompts, **facts))


def make_run(folder: Path, engine: FakeEngine | None = None, *flags: str, prompts: int = 16, **facts: Any):
    """The arguments and facts of a run, of 4 groups of 2 samples unless flags say otherwise."""
    checkpoint = folder / "model"
    if not checkpoint.exists():
        make_tiny_tokenizer().save_pretrained(checkpoint)
        (checkpoint / "config.json").write_text(
            json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 128})
        )
    data = folder / "prompts.jsonl"
    if not data.exists():
        write_prompts(data, prompts)
    defaults = {
        "--hf-checkpoint": str(checkpoint),
        "--prompt-data": str(data),
        "--label-key": "label",
        "--rollout-batch-size": "4",
        "--n-samples-per-prompt": "2",
        "--num-rollout": "1",
        "--rollout-max-response-len": "8",
        "--custom-rm-path": "rollout_plugins.token_sum",
    }
    argv = [token for name, value in defaults.items() if name not in flags for token in (name, value)]
    args = parse_args([*argv, *flags])
    info = {"vocab_size": 128, "max_context_len": 64, "rollout_num_engines": 1, "num_rollout": 1, **facts}
    if engine is not None:
        info |= {
            "sglang_router_ip": "127.0.0.1",
            "sglang_router_port": engine.port,
            "engine_urls": (engine.url,),
        }
    return args, RunInfo(run_id="test", run_dir=str(folder / "run"), **info)


def make_source(args: argparse.Namespace) -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer(args)


def counts(source: RolloutDataSourceWithBuffer) -> dict[str, int]:
    return dict(source.journal.counts)


def assert_conserved(source: RolloutDataSourceWithBuffer) -> None:
    """Every new group was trained, filtered, failed, or lies in the buffer, each exactly once."""
    c = source.journal.counts
    assert c["new"] + c["reissued"] == c["returned"] + c["trained"] + c["filtered"] + c["failed"]
    assert c["new"] == c["trained"] + c["filtered"] + c["failed"] + len(source.buffer)


@contextlib.contextmanager
def workers_of(folder, args, info, durable=None, balancers=None):
    from slime.runtime.local import LocalRuntime  # loads torch

    runtime = LocalRuntime(folder / "run", "test-rollout-workers-")
    try:
        workers = RolloutWorkers(args, info, runtime, durable, balancers or {})
        current.use(workers)
        yield workers
        assert not runtime.failure.done()  # a worker that dies does not end the run
    finally:
        current.use(None)
        workers.close()
        runtime.close()
        assert not [thread for thread in threading.enumerate() if "rollout-worker" in thread.name]

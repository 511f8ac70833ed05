"""Serves the small model with an engine and compares its log-probs with those of transformers."""

from pathlib import Path
from typing import Any

import torch

from slime.arguments import default_args
from slime.catalog.engines import ENGINES, EngineKind
from slime.cli.verify_model.reference import token_values
from slime.engines.engine_process import Command, EngineServer, LaunchPlan
from slime.engines.launch_plan import EnginePlace, EngineSite
from slime.utils.async_utils import run
from slime.utils.machine import shm
from slime.utils.machine.children import import_environment, thread_environment
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, SamplingParams

NEW_TOKENS = 12
_ON_CPU = {"CUDA_VISIBLE_DEVICES": ""}  # where log-probs are compared to the last bits


def check_engine(
    name: str, model: Path, prompts: list[list[int]], folder: Path, *, deadline_s: float
) -> float:
    """Return the largest difference of a log-prob between the engine and transformers."""
    kind, prefix = ENGINES[name], shm.make_prefix()
    plan = LaunchPlan(
        name=f"{name} engine",
        command=_command(kind, f"--engine {name}", model, prefix),
        env={**thread_environment(1), **({} if kind.own_python else _ON_CPU | import_environment())},
        log_path=folder / "engine.log",
        start_timeout_s=deadline_s,
    )
    server = EngineServer(plan)
    try:
        server.launch()
        url = server.wait_ready()
        drawn = [_draw(url, prompt, deadline_s) for prompt in prompts]
    finally:
        server.stop()
        shm.unlink_prefix(prefix)
    return _difference(model, prompts, drawn)


def _command(kind: EngineKind, flag: str, model: Path, prefix: str) -> Command:
    changes: dict[str, Any] = {"limits": {"embedded-requests": 16, "embedded-tokens": 4096}}
    changes |= kind.rules.interpreter(None, flag)
    # A folder with only a config has no tokenizer; requests are token ids anyway.
    skip = kind.takes_sglang_flags and not any(model.glob("tokenizer*"))
    words = ("--skip-tokenizer-init",) if skip else ()
    place = EnginePlace("engine", "default", "regular", machine=0, gpu_ids=(), num_gpus=1, words=words)
    site = EngineSite(str(model), False, place, gpu_ids=(), host="127.0.0.1", shm_prefix=prefix, threads=1)
    args = default_args(dtype="float32", **changes)
    command: Command = kind.command.run_command(args, site)
    return command


def _draw(url: str, prompt: list[int], deadline_s: float) -> tuple[tuple[int, ...], tuple[float, ...]]:
    client = EngineClient(url, timeout_s=deadline_s, max_retries=0)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True, sampling_seed=len(prompt))
    answer = run(client.generate(GenerateRequest(prompt, sampling)))
    assert answer.log_probs is not None, "log-probs were asked for"
    return answer.ids, answer.log_probs


@torch.no_grad()
def _difference(
    model: Path, prompts: list[list[int]], drawn: list[tuple[tuple[int, ...], tuple[float, ...]]]
) -> float:
    # Heavy import, only needed here.
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    worst = 0.0
    for prompt, (ids, log_probs) in zip(prompts, drawn, strict=True):
        tokens = torch.tensor([*prompt, *ids])
        expected, _ = token_values(lm(input_ids=tokens[None], use_cache=False).logits[0], tokens, len(ids))
        worst = max(worst, float((expected - torch.tensor(log_probs)).abs().max()))
    return worst

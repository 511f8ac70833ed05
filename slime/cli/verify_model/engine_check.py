"""A real engine serving the small model: log-probs of tokens that it draws,
against transformers on the same tokens.
"""

from pathlib import Path

import torch

from slime.arguments.passthrough.sglang import need_python
from slime.cli.verify_model.reference import token_values
from slime.engines.server import Command, EngineServer, LaunchPlan, embedded_command
from slime.engines.sglang.command import SGLangOptions, sglang_command
from slime.utils import shm
from slime.utils.async_utils import run
from slime.utils.processes import import_environment, thread_environment
from slime.wire.client import EngineClient
from slime.wire.protocol import GenerateRequest, SamplingParams

NEW_TOKENS = 12


def check_engine(
    kind: str, model: Path, prompts: list[list[int]], folder: Path, *, deadline_s: float
) -> float:
    """The largest difference of a log-prob between the engine and transformers."""
    prefix = shm.make_prefix()
    plan = LaunchPlan(
        name=f"{kind} engine",
        command=_command(kind, model, prefix),
        env={**thread_environment(1), **(import_environment() if kind == "embedded" else {})},
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


def _command(kind: str, model: Path, prefix: str) -> Command:
    if kind == "sglang":
        python = need_python(None, "--engine sglang")
        # A folder with only a config has no tokenizer, and tokens are all that is asked here.
        words = () if any(model.glob("tokenizer*")) else ("--skip-tokenizer-init",)
        return sglang_command(SGLangOptions(python, str(model), True, "float32", 1, 1234, False, extra=words))
    return embedded_command(
        model_path=str(model),
        device="cpu",
        dtype="float32",
        threads=1,
        max_running_requests=16,
        max_total_tokens=4096,
        seed=1,
        shm_prefix=prefix,
        await_weights=False,
    )


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

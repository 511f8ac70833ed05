"""Tasksets of verifiers, played by an agent of their own against a scripted engine."""

import sys
import textwrap

import pytest
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import flatten_samples

pytest.importorskip("verifiers.v1", reason="verifiers is not installed: make test-environments")

EOS = 2  # <|im_end|> of the tiny tokenizer
# The agent asks in this process: those that verifiers brings are programs which uv installs.
TASKSET = '''
import httpx
import verifiers.v1 as vf


class Data(vf.TaskData):
    number: int = 0


class Word(vf.Task[Data]):
    @vf.reward
    async def length(self, trace) -> float:
        if self.data.number in STUCK:
            raise OSError("the door is stuck")
        return float(len(trace.last_reply))


class Words(vf.Taskset[Word, vf.TasksetConfig]):
    def load(self):
        for number in range(7):
            yield Word(Data(prompt=f"say {number}", number=number), self.config.task)


class Twice(vf.Harness[vf.HarnessConfig]):
    """Asks, and asks again."""

    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **options):
        messages = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=60) as client:
            for _ in range(2):
                answer = await client.post(
                    f"{endpoint}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                answer.raise_for_status()
                message = answer.json()["choices"][0]["message"]
                messages += [
                    {"role": "assistant", "content": message["content"]},
                    {"role": "user", "content": "again"},
                ]
        return vf.ProgramResult(0, "", "")


__all__ = ["Twice", "Words"]
'''


def rollout(tmp_path, monkeypatch, name, stuck, *flags):
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(TASKSET).replace("STUCK", str(stuck)))
    monkeypatch.syspath_prepend(str(tmp_path))

    def answer(payload, number):
        return {"tokens": [20, 21, 22, EOS], "meta": {"finish_reason": {"type": "stop", "matched": EOS}}}

    with FakeEngine(answer) as engine:
        own = ("--env", f"verifiers:{name}", "--rollout-max-response-len", "60", *flags)
        args = make_args(tmp_path, engine, *own, "--custom-rm-path", "x.y", max_context_len=400)
        args.custom_rm_path = args.label_key = None
        args.prompt_data = f"env:verifiers:{name}#train:50"
        source = make_source(args)
        output = generate_rollout(args, 0, source)
    assert_conserved(source)
    sys.modules.pop(name, None)
    return output


def test_an_episode_of_verifiers_is_trained_as_the_engine_made_it(tmp_path, monkeypatch):
    output = rollout(tmp_path, monkeypatch, "words_v1", ())
    for sample in flatten_samples(output.samples):
        start = len(sample.tokens) - sample.response_length
        turns = sample.metadata["turns"]
        assert [sample.tokens[start + t["start"] : start + t["end"]] for t in turns] == [
            [20, 21, 22, EOS]
        ] * 2
        assert sum(sample.loss_mask) == 8
        assert sample.reward == sample.metadata["env_score"] == 3.0
        assert sample.metadata["agent"]["turns"] == 2


def test_a_taskset_that_breaks_is_a_failure_and_never_a_score(tmp_path, monkeypatch):
    output = rollout(tmp_path, monkeypatch, "stuck_v1", (1, 3, 5), "--reward-failure-action", "drop")
    assert output.metrics["rollout/groups/reward_infra_error"] > 0
    assert all(sample.reward == 3.0 for sample in flatten_samples(output.samples))


def test_a_taskset_that_is_not_installed_is_refused_by_name(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--env", "verifiers:nosuch-v1", "--custom-rm-path", "x.y")
        args.prompt_data = "env:verifiers:nosuch-v1#train:5"
        args.custom_rm_path = args.label_key = None
        with pytest.raises(ValueError, match="'nosuch-v1' not found"):
            make_source(args)

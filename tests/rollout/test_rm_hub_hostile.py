"""Hostile answers: each gets a score in little CPU time, no worker
hangs on one, and those given up are counted.
"""

import asyncio
import contextlib
import resource
import time
from inspect import signature
from pathlib import Path

import pytest
from argument_helpers import declared
from hostile_answers import EXPRESSIONS, TEXTS, answers_for

from slime.observability.rollout_metrics import NOT_COMPARED_KEY, sample_metrics
from slime.rollout.rm_hub import score_samples
from slime.rollout.rm_hub.instructions import CHECKS
from slime.rollout.rm_hub.workers import limits
from slime.rollout.rm_hub.workers.check_pool import close_pools, get_pool
from slime.utils.types import Sample

CPU_BUDGET_S = 0.1  # after which a check is broken off here; a run grants more (tests of the pool)
CPU_LIMIT_S = 5.0  # what is under way then ends late on a busy machine
TICKS_PER_S = 100
LABELS = {"gpqa": "C", "f1": "the cat", "ifbench": None, "deepscaler": r"\frac{x}{2}+1"}
ARGUMENTS = {
    **{"keywords": ["cat"], "forbidden_words": ["cat"], "keyword": "cat", "letter": "z", "first_word": "and"},
    **{
        "postscript_marker": "P.S.",
        "section_spliter": "Section",
        "prompt_to_repeat": "say",
        "end_phrase": "end",
    },
}


def instructions():
    """All of them, so that each answer meets each; what they ask for is
    a number unless ARGUMENTS says otherwise.
    """
    kwargs = [
        {
            name: ARGUMENTS.get(name, 3)
            for name, p in list(signature(check).parameters.items())[1:]
            if p.default is p.empty
        }
        for check in CHECKS.values()
    ]
    return {"instruction_id_list": list(CHECKS), "kwargs": kwargs}


def make_args(rm_type):
    return declared(
        rm_type=rm_type,
        reward_key="score",
        rollout_seed=1,
        timeouts={"reward": 120.0},  # nothing here may need it
        limits={"reward-retries": 0, "reward-failures": 1},
        reward_failure_action="stop",
    )


def make_sample(rm_type, response):
    metadata = instructions() if rm_type == "ifbench" else {}
    return Sample(
        index=0, response=response, label=LABELS.get(rm_type.removeprefix("boxed_"), "3"), metadata=metadata
    )


@pytest.fixture(autouse=True)
def _workers_of_one_test(monkeypatch):
    monkeypatch.setattr(limits, "CPU_BUDGET_S", CPU_BUDGET_S)
    yield
    close_pools()


def cpu_seconds(pids):
    """CPU time of this process, of these workers and what they forked, and of what has ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    total = time.process_time() + ended.ru_utime + ended.ru_stime
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            values = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, values[11:15])) / TICKS_PER_S
    return total


async def cpu_of_each(args, samples):
    """{name: CPU seconds} of scoring each.

    A plain answer goes before each: once it is scored, a worker that the answer before used up has ended and
    is counted. The start of a worker is not an answer's fault: one that begins meanwhile is not looked at.
    """
    used = {}
    for name, sample in samples.items():
        await score_samples(args, [make_sample(args.rm_type, r"<think>hm</think> \boxed{4}")])
        workers = [(worker.process, worker.pid) for worker in get_pool(args)._workers]
        pids = [pid for process, pid in workers if process is not None]
        pids += [process.pid for process, pid in workers if process is not None and process.pid != pid]
        before = cpu_seconds(pids)
        await score_samples(args, [sample])
        used[name] = cpu_seconds(pids) - before
    return used


@pytest.mark.parametrize(
    "rm_type", ["math", "deepscaler", "dapo", "boxed_dapo", "f1", "gpqa", "ifbench", "random"]
)
def test_every_hostile_answer_gets_a_score_in_little_time(rm_type):
    args = make_args(rm_type)
    samples = {name: make_sample(rm_type, response) for name, response in answers_for(rm_type).items()}
    assert len(samples) >= 60
    used = asyncio.run(cpu_of_each(args, samples))
    assert {name: round(cpu, 2) for name, cpu in used.items() if cpu > CPU_LIMIT_S} == {}
    assert [name for name, sample in samples.items() if sample.reward is None] == []
    killed = [
        name for name, sample in samples.items() if "timeout" in sample.metadata.get(NOT_COMPARED_KEY, "")
    ]
    assert killed == []
    right = [name for name, sample in samples.items() if value_of(sample) == 1 and rm_type != "random"]
    assert right == []


def value_of(sample):
    return sample.reward["score"] if isinstance(sample.reward, dict) else sample.reward


def test_there_are_sixty_answers_of_each_kind():
    assert len(TEXTS) >= 60 and len(EXPRESSIONS) >= 60


@pytest.mark.parametrize("rm_type, wrong", [("math", 0), ("deepscaler", 0), ("dapo", -1.0), ("f1", 0.0)])
def test_an_answer_too_large_to_compare_is_wrong_and_counted(rm_type, wrong):
    frame = "</think> \\boxed{{{}}} Answer: 4"
    large = "7" * 10_000_000 if rm_type in ("dapo", "f1") else "9^{9^{9^{9}}}"
    sample, plain = make_sample(rm_type, frame.format(large)), make_sample(rm_type, frame.format("4"))
    asyncio.run(score_samples(make_args(rm_type), [sample, plain]))
    assert value_of(sample) == wrong and sample.reward_failure is None
    assert sample.metadata[NOT_COMPARED_KEY]
    assert NOT_COMPARED_KEY not in plain.metadata
    assert sample_metrics([sample, plain])["answers_not_compared"] == 1
    assert "answers_not_compared" not in sample_metrics([plain])

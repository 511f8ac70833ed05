"""Plug-ins that make a namespace of their own, with the attributes they know, are served all the same."""

import asyncio
from types import SimpleNamespace

import pytest
from fake_engine import FakeEngine
from rollout_helpers import make_args, write_prompts

from slime.arguments.groups.eval_config import build_eval_dataset_configs
from slime.observability.logging_utils import log
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.rollout.filter_hub.dynamic_sampling_filters import check_reward_nonzero_std
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.sample_hooks import apply_rollout_sample_hooks
from slime.rollout.sglang_rollout import generate_and_rm
from slime.utils.async_utils import run
from slime.utils.types import Sample


def answer(**changes):
    values = dict(index=0, prompt="1+1", response="\\boxed{2}", label="2", status=Sample.Status.COMPLETED)
    return Sample(**values | changes)


def test_rewards_and_hooks():
    assert asyncio.run(async_rm(SimpleNamespace(rm_type="math"), answer())) == 1
    assert asyncio.run(batched_async_rm(SimpleNamespace(rm_type="math"), [answer(), answer(label="3")])) == [
        1,
        0,
    ]
    assert check_reward_nonzero_std(SimpleNamespace(), [answer(reward=1.0), answer(reward=0.0)]).keep
    sample = answer()
    assert asyncio.run(apply_rollout_sample_hooks(SimpleNamespace(), sample)) is sample


def test_data_and_metrics(tmp_path):
    data = write_prompts(tmp_path / "one.jsonl", 3)
    args = SimpleNamespace(
        prompt_data=str(data),
        input_key="input",
        label_key="label",
        n_samples_per_prompt=2,
        hf_checkpoint=None,
    )
    groups = RolloutDataSourceWithBuffer(args).get_samples(2)
    assert [len(group) for group in groups] == [2, 2]
    (config,) = build_eval_dataset_configs(SimpleNamespace(), [{"name": "a", "path": str(data)}], {})
    assert config.name == "a"
    log(SimpleNamespace(use_wandb=False), {"rollout/step": 1}, "rollout/step")


@pytest.mark.parametrize("custom", [{}, {"rollout_temperature": 0.5}])
def test_generation(tmp_path, custom):
    with FakeEngine() as engine:
        ours = make_args(tmp_path, engine)
        names = ("hf_checkpoint", "sglang_router_ip", "sglang_router_port", "rollout_max_response_len")
        args = SimpleNamespace(**{name: getattr(ours, name) for name in names}, rm_type="math", **custom)
        sample = run(generate_and_rm(args, Sample(index=0, prompt="1+1", label="2"), {"max_new_tokens": 4}))
    assert sample.response_length > 0 and sample.reward is not None

"""Import paths of slime up to 0.3.1: each module has the names it had there, and they do their work."""

import asyncio
import importlib
import json
import logging
import subprocess
from types import SimpleNamespace

import aiohttp
import pytest
import torch
from aiohttp import web

from slime.utils.types import Sample

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

# Module -> the names that it had in slime 0.3.1 or earlier, as far as projects import them.
NAMES = {
    "slime.utils.logging_utils": "configure_logger init_tracking log finish_tracking",
    "slime.utils.trace_utils": """
        TRACE_VERSION SGLANG_TRACE_META_KEYS TraceHandle TraceSpanContext bind_trace bind_trace_carrier
        build_sglang_meta_trace_attrs export_trace import_trace trace_event trace_span trace_next_attempt
        trace_function""",
    "slime.utils.tensorboard_utils": "_TensorboardAdapter",
    "slime.utils.wandb_utils": """
        init_wandb_primary init_wandb_secondary reinit_wandb_primary_with_open_metrics""",
    "slime.utils.metric_utils": """
        dict_add_prefix compute_pass_rate compute_statistics compression_ratio has_repetition
        compute_rollout_step""",
    "slime.ray.rollout": """
        compute_metrics_from_samples compute_perf_metrics_from_samples compute_rollout_step""",
    "slime.ray.rollout_data_source": "RolloutDataSource RolloutDataSourceWithBuffer pop_first",
    "slime.utils.ray_utils": "Box",
    "slime.agent.adapters.common": "flatten_content",
    "slime.agent.aiohttp_threaded": "FilteredAccessLogger run_app_in_thread",
    "slime.backends.megatron_utils.loss": """
        get_log_probs_and_entropy get_responses get_rollout_top_p_logprob_kwargs""",
    "slime.utils.ppo_utils": "compute_log_probs",
    "slime.utils.misc": "exec_command get_free_port",
    "slime.rollout.generate_hub.benchmarkers": "generate_with_random_osl",
    "slime.utils.eval_config": "DATASET_RUNTIME_SPECS DATASET_SAMPLE_SPECS pick_from_args",
}


def old(path: str):
    """The object behind `module.name` of an older release."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("module", NAMES)
def test_a_module_has_the_names_it_had(module):
    loaded = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(loaded, name)] == []


def test_a_module_of_a_package_is_imported_from_it():
    from slime.utils import logging_utils, metric_utils, trace_utils

    assert callable(logging_utils.log) and callable(metric_utils.dict_add_prefix)
    assert callable(trace_utils.trace_span)


def test_a_patched_logger_is_the_one_that_is_called(monkeypatch, tmp_path):
    import slime.observability.logging_utils as home

    monkeypatch.setattr("slime.utils.logging_utils._tracker", None)
    args = SimpleNamespace(run_dir=str(tmp_path))
    old("slime.utils.logging_utils.log")(args, {"a": 1.0, "rollout/step": 4}, step_key="rollout/step")
    home.finish_tracking()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["a"], row["step"]) == (1.0, 4)


# -- metrics


def sample(group, reward, length=4, **fields):
    made = Sample(group_index=group, index=group, reward=reward, response="x" * length, **fields)
    made.tokens, made.response_length, made.status = [1] * (length + 1), length, Sample.Status.COMPLETED
    return made


def test_metrics_of_samples_have_no_prefix_and_plug_ins_add_one():
    samples = [sample(0, 1.0), sample(0, 1.0, 8), sample(1, 0.0), sample(1, 1.0)]
    args = SimpleNamespace(advantage_estimator="grpo", reward_key=None, log_reward_category=None)
    metrics = old("slime.ray.rollout.compute_metrics_from_samples")(args, samples)
    assert metrics["response_len/mean"] == 5 and metrics["response_len/max"] == 8
    assert metrics["zero_std/count_1.0"] == 1 and metrics["truncated_ratio"] == 0
    prefixed = old("slime.utils.metric_utils.dict_add_prefix")(metrics, "rollout/")
    assert prefixed["rollout/repetition_frac"] == 0


def test_performance_of_samples_is_counted_per_gpu():
    metrics = old("slime.ray.rollout.compute_perf_metrics_from_samples")(
        SimpleNamespace(rollout_num_gpus=2), [sample(0, 1.0, 6), sample(0, 0.0, 10)], 4.0
    )
    assert metrics["rollout_time"] == 4.0 and metrics["tokens_per_gpu_per_sec"] == 2.0
    assert metrics["longest_sample_tokens_per_sec"] == 2.5


def test_pass_rates_of_equal_and_of_ragged_groups():
    rate = old("slime.utils.metric_utils.compute_pass_rate")
    assert rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    assert rate([1, 0], 1) == {}
    assert rate([1, 0, 0], 2, group_ids=["a", "a", "b"]) == {"pass@1": 0.25, "pass@2": 1.0}
    with pytest.raises(ValueError, match="3 rewards are not whole groups of 2"):
        rate([1, 0, 0], 2)


def test_texts_and_numbers_are_summed_up():
    assert old("slime.utils.metric_utils.compute_statistics")([1, 2, 6]) == {
        **{"mean": 3, "median": 2},
        **{"max": 6, "min": 1},
    }
    ratio, saved = old("slime.utils.metric_utils.compression_ratio")("ab" * 1000, algorithm="bz2")
    assert ratio > 10 and 90 < saved < 100
    assert old("slime.utils.metric_utils.compression_ratio")("") == (float("inf"), 0.0)
    assert old("slime.utils.metric_utils.has_repetition")("again " * 4000)
    with pytest.raises(ValueError, match="algorithm is 'zip'"):
        old("slime.utils.metric_utils.compression_ratio")("a", algorithm="zip")


def test_a_step_counted_in_optimizer_steps_is_logged_at_its_rollout(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.utils.logging_utils._tracker", None)
    args = SimpleNamespace(rollout_batch_size=4, n_samples_per_prompt=8, global_batch_size=16)
    args.run_dir, args.wandb_always_use_train_step = str(tmp_path), False
    step = old("slime.utils.metric_utils.compute_rollout_step")
    assert step(args, 3) == 3
    args.wandb_always_use_train_step = True
    assert step(args, 3) == 6 and old("slime.ray.rollout.compute_rollout_step")(args, 3) == 6
    logging_utils = importlib.import_module("slime.utils.logging_utils")
    logging_utils.log(args, {"eval/step": step(args, 3), "eval/x": 1}, step_key="eval/step")
    logging_utils.finish_tracking()
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["eval/step"] == 3


# -- trackers


def test_tensorboard_and_wandb_of_plug_ins_reach_the_metrics_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("slime.utils.logging_utils._tracker", None)
    args = SimpleNamespace(run_dir=str(tmp_path), use_wandb=False, use_tensorboard=False, wandb_run_id="abc")
    assert old("slime.utils.wandb_utils.init_wandb_secondary")(args, "abc") is None
    assert not (tmp_path / "metrics.jsonl").exists(), "trackers that are off open nothing"
    old("slime.utils.tensorboard_utils._TensorboardAdapter")(args).log({"loss": 0.5}, step=7)
    monkeypatch.setattr("slime.observability.tracking.chosen_trackers", lambda args: [])
    args.use_wandb = True
    assert old("slime.utils.wandb_utils.init_wandb_primary")(args) == "abc"
    old("slime.utils.logging_utils.finish_tracking")()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (row["loss"], row["step"]) == (0.5, 7)


def test_a_span_takes_the_words_of_plug_ins():
    trace_span, trace_function = (
        old("slime.utils.trace_utils.trace_span"),
        old("slime.utils.trace_utils.trace_function"),
    )
    traced = sample(0, 1.0)
    with pytest.raises(RuntimeError), trace_span(traced, "tool", attrs={"a": 1}, record_error=False) as span:
        span.set_attr("b", 2).update_attrs({"c": 3})
        raise RuntimeError("a secret")

    @trace_function("call", target="sample", record_error=False)
    def call(sample):
        return sample.index

    assert call(traced) == 0
    old("slime.utils.trace_utils.trace_next_attempt")(traced, attrs={"why": "aborted"})
    spans = traced.trace["spans"]
    assert [span["name"] for span in spans] == ["tool", "call", "attempt_start"]
    assert spans[0]["about"] == {"a": 1, "b": 2, "c": 3} and spans[-1]["about"]["attempt"] == 1


# -- losses


def packed(temperature=1.0):
    """Two samples (3 + 2 and 1 + 3 tokens) one after another, and what a loss of the user's own gets."""
    torch.manual_seed(0)
    logits = torch.randn(1, 9, 11, requires_grad=True)
    tokens = [torch.randint(0, 11, (5,)), torch.randint(0, 11, (4,))]
    options = dict(unconcat_tokens=tokens, total_lengths=[5, 4], response_lengths=[2, 3])
    return logits, dict(args=SimpleNamespace(rollout_temperature=temperature), **options), tokens


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_of_packed_logits_are_those_of_each_response(temperature):
    logits, options, tokens = packed(temperature)
    empty, found = old("slime.backends.megatron_utils.loss.get_log_probs_and_entropy")(
        logits, **options, with_entropy=True
    )
    assert empty.numel() == 0
    dist = (logits[0] / temperature).log_softmax(-1)
    expected = [
        dist[2:4].gather(1, tokens[0][3:, None])[:, 0],
        dist[5:8].gather(1, tokens[1][1:, None])[:, 0],
    ]
    for got, wanted in zip(found["log_probs"], expected, strict=True):
        torch.testing.assert_close(got, wanted)
    torch.testing.assert_close(found["entropy"][0], -(dist.exp() * dist).sum(-1)[2:4])
    sum(part.sum() for part in found["log_probs"]).backward()
    assert logits.grad is not None and logits.grad.abs().sum() > 0


def test_log_probs_are_over_the_ids_that_sampling_kept():
    logits, options, tokens = packed()
    kept = [[int(tokens[0][3]), 0, 1], []]
    batch = {
        "rollout_top_p_token_ids": [torch.tensor(kept[0]), torch.tensor([], dtype=torch.int64)],
        "rollout_top_p_token_offsets": [[0, 3, 3], [0, 0, 0, 0]],
    }
    loss = importlib.import_module("slime.backends.megatron_utils.loss")
    kwargs = loss.get_rollout_top_p_logprob_kwargs(SimpleNamespace(rollout_top_p=0.9), batch)
    cut = loss.get_log_probs_and_entropy(logits, **options, **kwargs)[1]["log_probs"]
    whole = loss.get_log_probs_and_entropy(logits, **options)[1]["log_probs"]
    first = logits[0, 2]
    ids = sorted(set(kept[0]))
    torch.testing.assert_close(cut[0][0], first[tokens[0][3]] - first[ids].logsumexp(0))
    torch.testing.assert_close(cut[0][1], whole[0][1])  # no ids were recorded for it
    torch.testing.assert_close(cut[1], whole[1])
    assert loss.get_rollout_top_p_logprob_kwargs(SimpleNamespace(rollout_top_p=1.0), {}) == {}
    with pytest.raises(ValueError, match="the batch has no rollout_top_p_token_ids"):
        loss.get_rollout_top_p_logprob_kwargs(SimpleNamespace(rollout_top_p=0.9), {})


def test_responses_that_do_not_fit_the_logits_are_an_error():
    logits, options, _ = packed()
    responses = old("slime.backends.megatron_utils.loss.get_responses")
    with pytest.raises(ValueError, match="the samples have 9 tokens, but the logits 5"):
        list(responses(logits[:, :5], **options))
    with pytest.raises(ValueError, match=r"expected \[1, T, V\]"):
        list(responses(logits[0], **options))


def test_log_probs_of_single_tokens_have_a_last_dimension():
    logits, tokens = torch.randn(3, 5), torch.tensor([0, 4, 2])
    found = old("slime.utils.ppo_utils.compute_log_probs")(logits, tokens, None)
    torch.testing.assert_close(found, logits.log_softmax(-1).gather(1, tokens[:, None]))


# -- the rest


def test_a_buffer_of_samples_is_the_one_of_today():
    import slime.rollout.data_source as home

    assert (
        old("slime.ray.rollout_data_source.RolloutDataSourceWithBuffer") is home.RolloutDataSourceWithBuffer
    )
    assert old("slime.utils.ray_utils.Box")("ref").inner == "ref"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ("plain", "plain"),
        ([{"type": "text", "text": "a"}, "b", {"type": "output_text", "text": "c"}], "a\nb\nc"),
        ([{"type": "tool_result", "content": [{"type": "text", "text": "in"}]}], "in"),
        ([{"type": "image_url", "image_url": {"url": "x"}}, {"text": "after"}], "[image omitted]\nafter"),
        ([{"type": "other", "content": "deep"}, {"type": "thinking"}], "deep"),
        (5, "5"),
    ],
)
def test_the_content_of_a_message_becomes_text(content, text):
    assert old("slime.agent.adapters.common.flatten_content")(content) == text


def test_requests_that_failed_are_logged_and_others_are_not(caplog):
    threaded = importlib.import_module("slime.agent.aiohttp_threaded")
    app = web.Application()
    app.router.add_get("/fine", lambda request: _answer())
    options = {"handler_cancellation": True, "access_log_class": threaded.FilteredAccessLogger}
    handle = threaded.run_app_in_thread(app, host="127.0.0.1", thread_name="mine", runner_kwargs=options)
    try:
        assert handle.thread.name == "mine"
        with caplog.at_level(logging.INFO, logger="aiohttp.access"):
            paths = ["fine", "missing", "fine"]  # a request is logged at the latest when the next one comes
            assert asyncio.run(_statuses(handle.port, paths)) == [200, 404, 200]
    finally:
        handle.stop()
    lines = [record.getMessage() for record in caplog.records if record.name == "aiohttp.access"]
    assert len(lines) == 1 and "/missing" in lines[0]


async def _answer():
    return web.Response(text="ok")


async def _statuses(port, names):
    async with aiohttp.ClientSession() as session:
        found = []
        for name in names:
            async with session.get(f"http://127.0.0.1:{port}/{name}") as response:
                found.append(response.status)
        return found


def test_a_line_of_bash_and_neighbouring_ports():
    run = old("slime.utils.misc.exec_command")
    assert run("printf hello", capture_output=True) == "hello" and run("true") is None
    with pytest.raises(subprocess.CalledProcessError):
        run("exit 3")
    from slime.utils.machine.ports import is_port_available

    first = old("slime.utils.misc.get_free_port")(20000, 3)
    assert all(is_port_available(first + offset) for offset in range(3))


def test_the_benchmark_generates_past_the_end_token_within_the_limit(monkeypatch):
    module = importlib.import_module("slime.rollout.generate_hub.benchmarkers")
    asked = []

    async def recorded(args, sample, sampling_params):
        asked.append(sampling_params)
        sample.response_length = sampling_params["max_new_tokens"]
        return sample

    monkeypatch.setattr(module, "generate", recorded)
    given = {"temperature": 1.0, "max_new_tokens": 64}
    for _ in range(50):
        asyncio.run(module.generate_with_random_osl(None, Sample(), given))
    assert given == {"temperature": 1.0, "max_new_tokens": 64}
    assert all(params["ignore_eos"] and 32 <= params["max_new_tokens"] <= 64 for params in asked)
    asyncio.run(module.generate_with_random_osl(None, Sample(), {}))
    assert 32 * 1024 <= asked[-1]["max_new_tokens"] <= 64 * 1024


def test_an_evaluation_service_takes_its_sampling_from_entry_defaults_and_flags():
    config = importlib.import_module("slime.utils.eval_config")
    names = ("n_samples_per_eval_prompt", "temperature", "top_p", "top_k", "max_response_len")
    specs = {name: config.DATASET_RUNTIME_SPECS[name] for name in names}
    entry = {"name": "aime", "temperature": 0.1}
    args = SimpleNamespace(eval_top_p=None, rollout_top_p=0.9, n_samples_per_eval_prompt=4)
    config._apply_dataset_field_overrides(args, entry, {"top_k": 7, "temperature": 0.5}, specs)
    assert entry == {
        **{"name": "aime", "temperature": 0.1, "top_p": 0.9, "top_k": 7},
        **{"n_samples_per_eval_prompt": 4, "max_response_len": None},
    }

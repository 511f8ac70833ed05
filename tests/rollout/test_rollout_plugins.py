"""Plug-ins of the default rollout: called as documented, with
fan-out handled wherever a group is looked at.
"""

import copy

import pytest
import rollout_plugins
from fake_engine import FakeEngine
from rollout_helpers import assert_conserved, make_args, make_source

from slime.rollout import sglang_rollout
from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from slime.rollout.data_source import RolloutDataSource
from slime.rollout.sglang_rollout import GenerateState, generate_and_rm, generate_rollout, get_model_url
from slime.utils.async_utils import run
from slime.utils.plugin_errors import PluginError
from slime.utils.types import Sample, flatten_samples


@pytest.fixture(autouse=True)
def fresh():
    rollout_plugins.calls.clear()


def rollout(folder, *flags):
    """(output, source, engine) of one rollout; the engine has stopped by then."""
    with FakeEngine() as engine:
        args = make_args(folder, engine, *flags)
        source = make_source(args)
        return generate_rollout(args, 3, source), source, engine


def test_a_custom_generate_gets_its_own_sampling_parameters_and_evaluation(tmp_path):
    output, source, engine = rollout(
        tmp_path, "--custom-generate-function-path", "rollout_plugins.wants_evaluation"
    )
    assert engine.requests == []
    assert all(s.tokens == [5, 6, 7] and s.reward == 7.0 for s in flatten_samples(output.samples))
    for evaluation, params in rollout_plugins.calls["wants_evaluation"]:
        assert evaluation is False and params["temperature"] == 1.0 and params["max_new_tokens"] == 8
    assert_conserved(source)


def test_a_custom_generate_may_come_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "async def gen(args, sample, sampling_params):\n"
        "    sample.tokens = [1, 9]; sample.response_length = 1; sample.reward = 2.0\n"
        "    sample.status = sample.Status.COMPLETED\n    return sample\n"
    )
    output, _, _ = rollout(tmp_path, "--custom-generate-function-path", f"{path}:gen")
    assert all(s.reward == 2.0 for s in flatten_samples(output.samples))
    assert "token_sum" not in rollout_plugins.calls  # a reward that is there is kept


def test_a_generate_function_that_returns_nothing_is_named(tmp_path):
    with pytest.raises(PluginError, match=r"rollout_plugins\.returns_nothing returned NoneType"):
        rollout(tmp_path, "--custom-generate-function-path", "rollout_plugins.returns_nothing")


def test_fan_out_siblings_share_a_rollout_id_and_are_rewarded_one_by_one(tmp_path):
    flags = ("--custom-generate-function-path", "rollout_plugins.fan_out")
    output, source, _ = rollout(
        tmp_path, *flags, "--dynamic-sampling-filter-path", "rollout_plugins.drop_every_third"
    )
    assert [[len(entry) for entry in group] for group in output.samples] == [[2, 2]] * 4
    for group in output.samples:
        for siblings in group:
            assert {s.rollout_id for s in siblings} == {siblings[0].index}
            assert [s.reward for s in siblings] == [20.0, 21.0]
            assert {s.group_index for s in siblings} == {group[0][0].group_index}
    assert all(isinstance(sample, Sample) for _, sample, _ in rollout_plugins.calls["token_sum"])
    assert {len(samples) for (samples,) in rollout_plugins.calls["drop_every_third"]} == {4}
    assert_conserved(source)


def test_a_group_reward_sees_the_whole_fanned_out_group(tmp_path):
    flags = ("--custom-generate-function-path", "rollout_plugins.fan_out", "--group-rm")
    output, _, _ = rollout(tmp_path, *flags, "--custom-rm-path", "rollout_plugins.group_rank")
    assert [s.reward for s in flatten_samples(output.samples[0])] == [0.0, 1.0, 2.0, 3.0]
    assert len(rollout_plugins.calls["group_rank"]) == 4


def test_fan_out_survives_over_sampling_and_partial_rollout(tmp_path):
    flags = ("--custom-generate-function-path", "rollout_plugins.fan_out", "--over-sampling-batch-size", "9")
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, *flags, "--partial-rollout")
        source = make_source(args)
        first = generate_rollout(args, 0, source)
        assert len(source.buffer) == 5
        second = generate_rollout(args, 1, source)
    indices = [s.index for s in flatten_samples([*first.samples, *second.samples])]
    assert len(indices) == 32 and len(set(indices)) == 16
    assert_conserved(source)


def test_siblings_with_different_rollout_ids_are_refused(tmp_path):
    path = tmp_path / "split.py"
    path.write_text(
        "import copy\n"
        "async def gen(args, sample, sampling_params):\n"
        "    a, b = copy.deepcopy(sample), copy.deepcopy(sample)\n    a.rollout_id, b.rollout_id = 1, 2\n"
        "    return [a, b]\n"
    )
    with pytest.raises(PluginError, match="siblings of one execution must share one"):
        rollout(tmp_path, "--custom-generate-function-path", f"{path}:gen")


def test_sample_hooks_run_in_order_with_the_arguments_they_accept(tmp_path):
    hooks = ("--rollout-sample-hook-path", "rollout_plugins.hook_in_place")
    output, _, _ = rollout(tmp_path, *hooks, "--rollout-sample-hook-path", "rollout_plugins.hook_async")
    assert all(s.metadata["hooked"] for s in flatten_samples(output.samples))
    assert rollout_plugins.calls["hook_in_place"] == [(3,)] * 8
    assert rollout_plugins.calls["hook_async"] == [(["evaluation", "rollout_id"],)] * 8


def test_a_hook_that_returns_something_else_is_named(tmp_path):
    with pytest.raises(PluginError, match=r"rollout_plugins\.hook_wrong returned int"):
        rollout(tmp_path, "--rollout-sample-hook-path", "rollout_plugins.hook_wrong")


def test_the_sample_filter_and_the_all_samples_hook_see_the_rollout(tmp_path):
    flags = ("--rollout-sample-filter-path", "rollout_plugins.remove_first", "--dynamic-sampling-filter-path")
    flags += (
        "rollout_plugins.drop_every_third",
        "--rollout-all-samples-process-path",
        "rollout_plugins.see_all",
    )
    output, source, _ = rollout(tmp_path, *flags)
    assert output.samples[0][0].remove_sample and not output.samples[1][0].remove_sample
    [(groups, given_source)] = rollout_plugins.calls["see_all"]
    assert given_source is source
    indices = [group[0].group_index for group in groups]
    assert indices == sorted(indices) and 0 in indices  # dropped ones are there too


def test_module_globals_can_be_replaced(tmp_path, monkeypatch):
    async def mine(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.reward = [1, 2], 1, 5.0
        sample.status = Sample.Status.COMPLETED
        return sample

    monkeypatch.setattr(sglang_rollout, "generate", mine)
    output, _, _ = rollout(tmp_path)
    assert all(s.reward == 5.0 for s in flatten_samples(output.samples))


def test_load_function_is_looked_up_in_the_module(tmp_path, monkeypatch):
    seen = []

    async def mine(args, sample, sampling_params):
        sample.reward, sample.status = 1.0, Sample.Status.COMPLETED
        return sample

    monkeypatch.setattr(sglang_rollout, "load_function", lambda path: seen.append(path) or mine)
    args = make_args(tmp_path)
    sample = Sample(index=0, generate_function_path="anything.at_all")
    assert run(generate_and_rm(args, sample, {})).reward == 1.0 and seen == ["anything.at_all"]


def test_the_state_belongs_to_its_arguments_and_shares_no_parameters(tmp_path):
    args = make_args(tmp_path)
    state = GenerateState(args)
    assert GenerateState(args) is state and GenerateState(copy.copy(args)) is not state
    state.sampling_params["temperature"] = 0.0
    assert state.sampling_params["temperature"] == 1.0
    assert state.aborted is False


def test_the_model_url_is_that_of_the_router(tmp_path):
    args = make_args(tmp_path, sglang_router_ip="127.0.0.1", sglang_router_port=1234)
    assert get_model_url(args, "default") == "http://127.0.0.1:1234/generate"
    args.sglang_model_routers = {"judge": ("127.0.0.1", 99)}
    assert get_model_url(args, "judge", "/score") == "http://127.0.0.1:99/score"
    with pytest.raises(ValueError, match="no model 'poet'"):
        get_model_url(args, "poet")


def test_bare_results_of_a_rollout_function_are_wrapped():
    assert call_rollout_fn(lambda *a, evaluation: [[1]], evaluation=False) == RolloutFnTrainOutput([[1]])
    assert call_rollout_fn(lambda *a, evaluation: {"x": {}}, evaluation=True) == RolloutFnEvalOutput(
        {"x": {}}
    )
    with pytest.raises(TypeError, match="returned NoneType; expected RolloutFnTrainOutput"):
        call_rollout_fn(lambda *a, evaluation: None, evaluation=False)


def test_a_group_whose_generate_function_gave_up_is_tried_again(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--custom-generate-function-path", "rollout_plugins.gives_up_once")
        source = make_source(args)
        outputs = [generate_rollout(args, rollout_id, source) for rollout_id in range(2)]
    samples = flatten_samples([group for output in outputs for group in output.samples])
    again = [s for s in samples if s.metadata.get("attempt")]
    assert [s.group_index for s in again] == [1, 1] and all(s.reward == 7.0 for s in again)
    assert_conserved(source)


def test_surplus_of_a_source_without_buffer_is_given_up_and_counted(tmp_path):
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--over-sampling-batch-size", "6")
        source = RolloutDataSource(args)
        output = generate_rollout(args, 0, source)
    assert output.metrics["rollout/groups/failed"] == 2
    assert source.journal.counts == {"new": 6, "trained": 4, "failed": 2}


def test_an_exhausted_data_source_stops_the_rollout(tmp_path):
    class Finite:
        def __init__(self, source):
            self.groups = source.get_samples(3)

        def get_samples(self, num_samples):
            taken, self.groups = self.groups[:num_samples], self.groups[num_samples:]
            return taken

        def add_samples(self, groups):
            self.groups += groups

    with FakeEngine() as engine:
        args = make_args(tmp_path, engine)
        source = Finite(make_source(args))
        with pytest.raises(RuntimeError, match=r"gave no groups: 3 of --rollout-batch-size 4"):
            generate_rollout(args, 0, source)
    assert len(source.groups) == 3


MISTAKES = {
    "--custom-generate-function-path": "async def f(args, sample, sampling_params):",
    "--rollout-sample-hook-path": "def f(args, sample):",
    "--custom-rm-path": "async def f(args, sample):",
    "--dynamic-sampling-filter-path": "def f(args, samples):",
    "--rollout-sample-filter-path": "def f(args, groups):",
    "--rollout-all-samples-process-path": "def f(args, all_groups, data_source):",
    "--buffer-filter-path": "def f(args, rollout_id, buffer, num_samples):",
}


@pytest.mark.parametrize("option, head", MISTAKES.items())
def test_a_mistake_in_a_plug_in_stops_the_run_at_the_first_with_file_and_line(tmp_path, option, head):
    path, log = tmp_path / "mine.py", tmp_path / "calls"
    path.write_text(f"{head}\n    open({str(log)!r}, 'a').write('x')\n    return {{}}['gold']\n")
    flags = ("--group-failure-action", "drop", "--reward-failure-action", "drop")
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, option, f"{path}:f", *flags)
        source = make_source(args)
        if option == "--buffer-filter-path":
            source.add_samples([source.get_samples(1)[0]])
        with pytest.raises(PluginError) as caught:
            generate_rollout(args, 3, source)
    for part in (option, "KeyError: 'gold'", f"{path}:3 in f: return {{}}['gold']"):
        assert part in str(caught.value)
    # Tasks that ran beside the first may have met it too; none has tried again.
    assert len(log.read_text()) <= 8
    if option == "--custom-rm-path":
        assert "prompt 'q" in str(caught.value) and "response 'xxxx'" in str(caught.value)


def test_an_engine_s_garbage_is_no_mistake_of_the_generate_function_that_met_it(tmp_path):
    with FakeEngine(lambda payload, number: "garbage" if number == 0 else None) as engine:
        args = make_args(tmp_path, engine, "--custom-generate-function-path", "rollout_plugins.never_ends")
        output = generate_rollout(args, 3, make_source(args))
    assert len(flatten_samples(output.samples)) == 8


def test_a_mistake_in_an_evaluation_s_own_reward_stops_it_too(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("async def f(args, sample):\n    return sample.metadata['gold']\n")
    with FakeEngine() as engine:
        args = make_args(tmp_path, engine, "--eval-prompt-data", "held", str(tmp_path / "prompts.jsonl"))
        args.eval_datasets[0].custom_rm_path = f"{path}:f"
        with pytest.raises(PluginError, match=f"{path}:2 in f"):
            generate_rollout(args, 3, make_source(args), evaluation=True)

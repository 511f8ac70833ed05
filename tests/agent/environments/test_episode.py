"""Episodes against a scripted engine over real HTTP: tokens, budgets, failures and continuation."""

import contextlib
import itertools

import environments_under_test as envs
import pytest
from fake_engine import FakeEngine, sample_index
from patience import longer_each_time
from rollout_helpers import assert_conserved, make_args, make_source

from slime.agent.environments import episode
from slime.batch.convert import samples_to_batch
from slime.catalog.environments import HELD_OUT, read_choices, source_of
from slime.observability.rollout_metrics import eval_metrics
from slime.rollout.base_types import call_rollout_fn
from slime.rollout.prompt_groups import copy_sample
from slime.rollout.rm_hub.outcomes import RewardFailuresExceeded
from slime.rollout.sglang_rollout import generate_rollout
from slime.utils.types import Sample, flatten_samples

EOS = 2  # <|im_end|> of the tiny tokenizer


@pytest.fixture(autouse=True)
def fresh():
    envs.threads.clear()
    envs.made.clear()
    envs.released.clear()
    episode._waiting.clear()
    yield
    envs.released.set()


def answer(payload, number):
    """Four characters and the end, like a model that stops by itself, as far as it may write."""
    room = payload["sampling_params"]["max_new_tokens"]
    return {"tokens": [20, 21, 22, 23, EOS][:room], "finish": "stop" if room >= 5 else "length"}


def env_args(folder, engine, name, *flags, **facts):
    own = ("--env", f"environments_under_test:{name}", "--rollout-max-response-len", "120", *flags)
    facts = {"max_context_len": 400, **facts}
    args = make_args(folder, engine, *own, "--custom-rm-path", "x.y", **facts)
    args.custom_rm_path = args.label_key = None
    if "--prompt-data" not in flags:
        args.prompt_data = f"env:environments_under_test:{name}#train:50"
    return args


def play(args, source=None, rollout_id=0):
    return call_rollout_fn(generate_rollout, args, rollout_id, source or make_source(args), evaluation=False)


def test_an_episode_keeps_every_token_and_trains_only_what_the_policy_wrote(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown", "--apply-chat-template")
        source = make_source(args)
        output = play(args, source)
    for sample in flatten_samples(output.samples):
        wrote = [20, 21, 22, 23, EOS]
        prompt = len(sample.tokens) - sample.response_length
        trained = [t for t, m in zip(sample.tokens[prompt:], sample.loss_mask, strict=True) if m]
        assert trained == wrote * 3
        assert [end - start for start, end, _ in sample.turn_rewards] == [5, 5, 5]
        for start, end, _ in sample.turn_rewards:
            assert sample.tokens[prompt + start : prompt + end] == wrote
            assert sample.loss_mask[start:end] == [1] * 5
        assert sample.prompt.startswith("<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\ngo ")
        assert "<|im_start|>user\nleft 2<|im_end|>\n<|im_start|>assistant\n" in sample.response
        assert sample.reward == 3.5 and [r for _, _, r in sample.turn_rewards] == [1.0, 1.0, 1.5]
        assert sample.status is Sample.Status.COMPLETED and sample.metadata["episode_end"] == "done"
        assert sample.metadata["steps"] == 3
        assert {k: sample.metadata["agent"][k] for k in ("turns", "tool_calls", "tool_errors")} == {
            "turns": 3,
            "tool_calls": 6,
            "tool_errors": 3,
        }
    assert_conserved(source)


def test_each_prompt_extends_the_ids_of_the_turn_before_at_the_same_engine(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown", "--apply-chat-template", "--rollout-batch-size", "1")
        args.over_sampling_batch_size = 1
        play(args)
    by_session = {}
    for payload, headers in zip(engine.requests, engine.headers, strict=True):
        by_session.setdefault(headers["X-SMG-Routing-Key"], []).append(payload["input_ids"])
    assert len(by_session) == 2 and all(len(prompts) == 3 for prompts in by_session.values())
    for prompts in by_session.values():
        for before, after in itertools.pairwise(prompts):
            assert after[: len(before) + 5] == [*before, 20, 21, 22, 23, EOS]


def test_samples_of_a_group_play_the_same_item_and_each_episode_has_a_thread(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown")
        output = play(args)
    for group in output.samples:
        assert len({s.prompt for s in flatten_samples([group])}) == 1
    assert len({s.prompt for s in flatten_samples(output.samples)}) > 1
    assert all(thread.startswith("environment ") for _, thread in envs.threads)


def test_plain_text_is_put_behind_the_answer_where_there_is_no_template(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "AsyncCountdown")
        sample = flatten_samples(play(args).samples)[0]
    assert sample.prompt.startswith("be brief\ngo ")
    assert sample.response_length == 3 * 5 + 2 * len("left 2")


def test_two_players_become_two_samples_of_one_rollout_that_are_compared_by_role(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Duel")
        groups = play(args).samples
    for group in groups:
        for entry in group:
            first, second = entry
            assert (first.reward, second.reward) == (-1.0, 1.0)
            assert first.rollout_id == second.rollout_id == first.index
            assert [s.metadata["agent_role"] for s in entry] == ["player 0", "player 1"]
            assert len(first.turn_rewards) == len(second.turn_rewards) == 2
    batch = samples_to_batch(args, groups)
    assert len(batch["tokens"]) == 16 and len(set(batch["rollout_ids"])) == 8
    assert batch["rewards"] == [0.0] * 16  # whoever plays second wins: nothing to learn from that


def test_rows_of_a_file_are_played(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "FromRows", "--prompt-data", str(tmp_path / "prompts.jsonl"))
        args.label_key = "label"
        samples = flatten_samples(play(args).samples)
    assert [s.reward for s in samples] == [float(s.label) for s in samples]
    assert samples[2].prompt == "row q1"


@pytest.mark.parametrize(
    "flags, end, rewards",
    [
        (("--max-turns", "2"), "max_turns", [1, 1.5]),
        (("--rollout-max-response-len", "14"), "max_tokens", [1, 0.5]),  # three tokens of a second turn
        (("--rollout-max-response-len", "11"), "max_tokens", [1.5]),  # no room behind the observation
    ],
)
def test_budgets_end_an_episode_with_what_it_earned(tmp_path, flags, end, rewards):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown", *flags)
        samples = flatten_samples(play(args).samples)
    for sample in samples:
        assert sample.metadata["episode_end"] == end and [r for _, _, r in sample.turn_rewards] == rewards
        assert sample.status is Sample.Status.TRUNCATED and sample.reward == sum(rewards)
        assert sample.response_length <= args.rollout_max_response_len


def test_a_turn_has_a_budget_of_its_own(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown", "--turn-max-response-len", "6")
        play(args)
    assert {payload["sampling_params"]["max_new_tokens"] for payload in engine.requests} == {6}


def test_an_episode_that_is_out_of_time_ends_with_the_turns_it_has(tmp_path):
    def slow_second_turn(payload, number):
        return answer(payload, number) if len(payload["input_ids"]) < 20 else {"hold": True}

    with FakeEngine(slow_second_turn) as engine:
        for seconds in longer_each_time(0.5):
            args = env_args(tmp_path, engine, "Countdown", "--timeouts", f"episode={seconds:g}")
            with contextlib.suppress(RewardFailuresExceeded):  # without a turn there is nothing to score
                samples = flatten_samples(play(args).samples)
                break
    assert {(s.metadata["episode_end"], len(s.turn_rewards), s.reward) for s in samples} == {
        ("deadline", 1, 1.5)
    }


@pytest.mark.parametrize(
    "name, said",
    [
        ("Raises", "step raised KeyError: 'no such door'"),
        ("Rubbish", "step returned dict; return a StepResult"),
        ("NotANumber", "step gave the reward nan"),
        ("Nothing", "step returned no observation before the end"),
    ],
)
def test_an_environment_that_breaks_is_a_failure_with_its_name_and_never_a_score(tmp_path, name, said):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, name, "--reward-failure-action", "stop")
        with pytest.raises(Exception, match="infra_error") as stopped:
            play(args)
    assert f"environment environments_under_test:{name}: {said}" in str(stopped.value)


def test_an_environment_that_hangs_is_left_behind_and_its_deadline_is_named(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Hangs", "--timeouts", "env=0.3", "--reward-failure-action", "stop")
        # A busy machine may need longer than that for an earlier call, too.
        late = r"(its start|reset|step) did not return within --timeouts env=0\.3"
        with pytest.raises(Exception, match=late):
            play(args)


def test_failed_episodes_are_dropped_and_counted_where_that_is_wanted(tmp_path, monkeypatch):
    monkeypatch.setattr(envs.Countdown, "step", _every_second(envs.Countdown.step))
    with FakeEngine(answer) as engine:
        args = env_args(
            tmp_path,
            engine,
            "Countdown",
            "--reward-failure-action",
            "drop",
        )
        args.rollout_batch_size, args.n_samples_per_prompt = 3, 1
        source = make_source(args)
        output = play(args, source)
    assert len(output.samples) == 3 and output.metrics["rollout/groups/reward_infra_error"] > 0
    assert_conserved(source)


def _every_second(step):
    def broken(self, action):
        if envs.made.index(self) % 2:
            raise OSError("the door is stuck")
        return step(self, action)

    return broken


def cut_rollout(tmp_path, *flags, waits=True):
    """A rollout that ends while episodes are in their second turn; then the next one, which holds nothing."""
    holding, held_back = {"on": True}, set()

    def hold_others(payload, number):
        is_first = len(payload["input_ids"]) < 20
        if is_first or not holding["on"]:
            return answer(payload, number)
        if sample_index(payload) > 1:
            held_back.add(payload["rid"])
            return {"hold": True, "tokens": [30, 31]}
        return {**answer(payload, number), "until": lambda: len(held_back) == 4}

    with FakeEngine(hold_others) as engine:
        args = env_args(
            tmp_path, engine, "Countdown", "--rollout-batch-size", "2",
            "--over-sampling-batch-size", "6", "--partial-rollout", *flags,
        )  # fmt: skip
        args.n_samples_per_prompt = 1
        source = make_source(args)
        play(args, source)
        held = [copy_sample(s) for group in source.buffer for s in flatten_samples(group)]
        holding["on"] = False
        if not waits:
            episode._waiting.clear()
        before = len(envs.made)
        done = {s.index: s for _ in range(2) for s in flatten_samples(play(args, source).samples)}
        return held, done, len(envs.made) - before


@pytest.mark.parametrize("waits", [True, False], ids=["waiting", "replayed"])
def test_a_partial_episode_continues_in_the_next_rollout(tmp_path, waits):
    held, done, _ = cut_rollout(tmp_path, waits=waits)
    cut = [s for s in held if s.status is Sample.Status.ABORTED and s.response_length]
    assert cut, "no episode was cut in a turn"
    for sample in (done[s.index] for s in cut if s.index in done):
        assert [end - start for start, end, _ in sample.turn_rewards] == [5, 7, 5]  # 30, 31 and the rest
        start = len(sample.tokens) - sample.response_length + sample.turn_rewards[1][0]
        assert sample.tokens[start : start + 7] == [30, 31, 20, 21, 22, 23, EOS]
        assert sample.metadata["agent"]["turns"] == 3 and "episode_progress" not in sample.metadata
        assert sample.reward == sum(r for _, _, r in sample.turn_rewards)


def test_a_partial_episode_starts_again_where_that_is_wanted(tmp_path):
    held, done, _ = cut_rollout(tmp_path, "--partial-episodes", "restart")
    assert all(not s.response_length for s in held if s.status is Sample.Status.ABORTED)
    assert all([end - start for start, end, _ in s.turn_rewards] == [5, 5, 5] for s in done.values())


def test_tasks_are_evaluated_apart_on_held_out_items_and_failures_are_no_zeros(tmp_path, monkeypatch):
    monkeypatch.setattr(envs.Countdown, "step", _every_second(envs.Countdown.step))
    with FakeEngine(answer) as engine:
        held_out = source_of(read_choices("environments_under_test:Countdown"), HELD_OUT, 6)
        flags = ("--eval-prompt-data", "Countdown", held_out, "--eval-interval", "1")
        args = env_args(tmp_path, engine, "Countdown", *flags)
        [config] = args.eval_datasets
        output = call_rollout_fn(generate_rollout, args, 0, make_source(args), evaluation=True)
    result = output.data[config.name]
    assert len(result["rewards"]) == 3 and set(result["rewards"]) == {3.5}
    assert output.metrics["eval/Countdown/reward_failures"] == 3
    assert all(s.metadata["env_held_out"] and s.metadata["env_seed"] % 2 == 0 for s in result["samples"])
    metrics = eval_metrics(args, output.data)
    assert metrics["eval/Countdown/agent/turns"] == 3 and metrics["eval/Countdown/agent/tool_errors"] == 3


def test_a_resumed_run_hands_out_the_items_that_the_interrupted_one_would_have(tmp_path):
    with FakeEngine(answer) as engine:
        args = env_args(tmp_path, engine, "Countdown", "--rollout-shuffle")
        source = make_source(args)
        source.get_samples(5)
        state = source.state_dict()
        expected = [g[0].metadata["env_seed"] for g in source.get_samples(20)]
        resumed = make_source(args)
        resumed.load_state_dict(state)
        assert [g[0].metadata["env_seed"] for g in resumed.get_samples(20)] == expected

"""Whole runs in an environment: many turns, and engine and trainer agree on every token."""

from loop_helpers import make_world, run_train, series

ENVIRONMENT = '''
"""Eight turns; a turn earns the share of letters from the first half of the alphabet in what was said."""

from slime.agent.environments.protocol import Observation, StepResult


class Letters:
    def reset(self, item):
        self.turn = 0
        return Observation(f"round {item.seed % 1000}: say letters, as you like", system="Play.")

    def step(self, action):
        self.turn += 1
        share = sum(c in "abcdefghijklm" for c in action) / max(1, len(action))
        return StepResult(f"go on {self.turn}", reward=share / 8, done=self.turn == 8, tool_calls=1)
'''


def test_a_run_in_an_environment_trains_turns_exactly_and_uses_the_prefix_cache(tmp_path):
    world = make_world(tmp_path)
    (world / "letters.py").write_text(ENVIRONMENT)
    run_train(
        world,
        "run",
        prompt_data=None,
        label_key=None,
        custom_rm_path=None,
        env=f"{world}/letters.py:Letters",
        apply_chat_template=True,
        rollout_max_response_len=600,
        turn_max_response_len=5,
        turn_discount=0.5,
        max_tokens_in_flight=8000,
        max_tokens_per_gpu=4096,
        num_rollout=2,
        lr=5e-3,
    )
    difference = series(world, "run", "train/logprob_abs_diff/lag_0")
    assert len(difference) == 2 and max(difference.values()) < 1e-5, difference
    assert set(series(world, "run", "rollout/agent/turns").values()) == {8.0}
    assert set(series(world, "run", "rollout/agent/trained_per_sampled").values()) == {1.0}
    hits = series(world, "run", "rollout/prefix_cache_hit_rate")
    assert min(hits.values()) > 0.7, hits

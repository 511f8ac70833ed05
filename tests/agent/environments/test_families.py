"""The families of --env with their real packages; `make test-environments` installs these and runs this."""

import random

import pytest

from slime.agent.environments import textarena
from slime.agent.environments.protocol import Item
from slime.agent.environments.rows import check_task, read_environment, seed_of
from slime.catalog.environments import read_choices


def need(package):
    pytest.importorskip(package, reason=f"needs {package}: make test-environments installs it")


def test_every_task_of_reasoning_gym_asks_the_same_again_and_keeps_the_two_sides_apart():
    need("reasoning_gym")
    from slime.agent.environments.reasoning_gym import is_held_out, make, task_names

    assert len(task_names()) > 100
    for task in ("chain_sum", "gcd", "spell_backward", "leg_counting", "number_sorting"):
        environment = make(task, {})
        for held_out in (False, True):
            item = Item(seed_of(5, held_out), held_out)
            question = environment.reset(item).text
            assert question == make(task, {}).reset(item).text and is_held_out(question) == held_out
            right = environment.step(f"I think <answer>{environment.entry['answer']}</answer>")
            assert (right.reward, right.done) == (1.0, True)
            assert make(task, {}).reset(item) and environment.step("no").reward < 1.0


def test_near_matches_are_named_for_a_task_that_is_not_there():
    need("reasoning_gym")
    with pytest.raises(ValueError, match=r"has no task 'chainsum'; did you mean chain_sum"):
        list(read_environment("env:reasoning_gym:chainsum#train:5"))
    rows = [row["metadata"]["env"] for _, row in read_environment("env:reasoning_gym:gcd=3+lcm#train:8")]
    assert sorted(rows) == ["reasoning_gym:gcd"] * 6 + ["reasoning_gym:lcm"] * 2


def play_textarena(options, item, actions):
    from slime.agent.environments.textarena import make

    game = make("TicTacToe-v0", options)
    first = game.reset(item)
    results = [game.step(action) for action in actions]
    return game, first, results


def test_a_game_of_two_is_played_by_both_sides_and_each_gets_its_score():
    need("textarena")
    game, first, results = play_textarena({}, Item(seed=1), ["[0]", "[3]", "[1]", "[4]", "2"])
    assert game.num_players == 2 and first.player == 0 and "You are Player 0" in first.text
    assert [r.observation.player for r in results[:-1]] == [1, 0, 1, 0]
    assert "[Player 0]" in results[0].observation.text and "You are Player 1" in results[0].observation.text
    assert "You are Player" not in results[1].observation.text, "only what is new is read"
    assert results[-1].done and game.score() == {0: 1.0, 1: -1.0}


def test_a_held_out_game_is_played_against_legal_moves_by_chance():
    need("textarena")
    from slime.agent.environments.textarena import make

    for seed in range(0, 12, 2):
        game = make("TicTacToe-v0", {})
        text = game.reset(Item(seed, held_out=True)).text
        assert game.num_players == 1
        generator, done = random.Random(seed), False
        while not done:
            from slime.agent.environments.textarena import random_move

            result = game.step(random_move(text, generator))
            done, text = result.done, "" if result.done else result.observation.text
        assert game.score()[0] in (-1.0, 0.0, 1.0)


def test_games_draw_from_their_own_seed_and_leave_pythons_generator_alone():
    need("textarena")
    from slime.agent.environments.textarena import make

    random.seed(3)
    expected = random.random()
    random.seed(3)
    texts = [make("KuhnPoker-v0", {}).reset(Item(seed=9)).text for _ in range(3)]
    assert random.random() == expected and len(set(texts)) == 1


def test_a_game_for_one_ends_with_a_score():
    need("textarena")
    from slime.agent.environments.textarena import make

    game = make("GuessTheNumber-v0", {})
    game.reset(Item(seed=1))
    done, guess = False, 1
    while not done:
        done, guess = game.step(f"[{guess}]").done, guess + 1
    assert game.num_players == 1 and 0 in game.score()


def make_gymnasium(task, options):
    from slime.agent.environments.gymnasium import make

    return make(task, options)


def test_gymnasium_writes_observations_and_reads_actions():
    need("gymnasium")
    make = make_gymnasium
    options = {"actions": ["left", "down", "right", "up"], "is_slippery": False, "render_mode": "ansi"}
    lake = make("FrozenLake-v1", options)
    assert "Actions: left, down, right, up" in lake.reset(Item(seed=1)).text
    assert lake.step("hm?").tool_errors == 1
    results = [lake.step(f"I go {way}") for way in ("down", "down", "right", "right", "down", "Right!")]
    assert results[-1].done and results[-1].reward == 1.0
    pole = make("CartPole-v1", {})
    assert pole.reset(Item(seed=1)).text.startswith("Actions: 0, 1\nObservation: [")
    assert pole.step("push 1").reward == 1.0
    swing = make("Pendulum-v1", {})
    swing.reset(Item(seed=1))
    assert swing.step("no force").observation.text.startswith("No action was found")
    assert swing.step("torque 0.5").reward < 0


def test_gymnasium_shows_what_an_environment_draws():
    need("gymnasium")
    import gymnasium
    import numpy as np

    class Lamp(gymnasium.Env):
        metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as gymnasium wants it
        observation_space = action_space = gymnasium.spaces.Discrete(2)

        def __init__(self, render_mode=None):
            self.render_mode, self.lit = render_mode, 0

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return self.lit, {}

        def step(self, action):
            self.lit = int(action)
            return self.lit, 0.0, False, False, {}

        def render(self):
            return np.full((3, 4, 3), 255 * self.lit, dtype=np.uint8)

    gymnasium.register("Lamp-v0", entry_point=Lamp)
    try:
        lamp = make_gymnasium("Lamp-v0", {"render_mode": "rgb_array"})
        first = lamp.reset(Item(seed=1))
        assert first.text == "Actions: 0, 1" and first.images[0].getpixel((0, 0)) == (0, 0, 0)
        [picture] = lamp.step("1").observation.images
        assert picture.size == (4, 3) and picture.getpixel((3, 2)) == (255, 255, 255)
        assert make_gymnasium("Lamp-v0", {}).reset(Item(seed=1)).text == "Actions: 0, 1\nObservation: 0"
    finally:
        del gymnasium.registry["Lamp-v0"]


def test_a_family_without_its_package_names_the_extra(monkeypatch):
    monkeypatch.setattr("slime.agent.environments.rows.is_installed", lambda name: False)
    with pytest.raises(ValueError, match=r"pip install 'slime-rl\[textarena\]'"):
        check_task(read_choices("textarena:TicTacToe-v0")[0], "--env")


def test_an_opponent_that_asks_for_random_numbers_gets_those_of_its_game(tmp_path):
    file = tmp_path / "bots.py"
    file.write_text(
        "def chance(text, rng):\n    return f'[{rng.randrange(10**6)}]'\n\n\n"
        "def plain(text, loud=False):\n    return text.upper() if loud else text\n\n\n"
        "def only_text(text):\n    return text\n"
    )
    names = ("chance", "plain", "only_text")
    chance, plain, only_text = (textarena._opponent_of(f"{file}:{name}") for name in names)
    assert chance("x", random.Random(3)) == chance("x", random.Random(3)) != chance("x", random.Random(4))
    assert only_text("x", random.Random(3)) == plain("x", random.Random(3)) == "x"

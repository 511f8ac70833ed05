"""A recorded rollout trains to the same numbers on every
runtime and number of ranks; a live run starts the same.
"""

import json

import pytest
from loop_helpers import make_world, metrics, run_train, series

NUM_ROLLOUTS = 3
COMPARED = ("train/loss", "train/pg_loss", "train/grad_norm", "train/entropy_loss")
VARIANTS = {
    "ray": {"runtime": "ray"},
    "two-ranks": {"actor_num_gpus_per_node": 2},
    "small-micro-batches": {"max_tokens_per_gpu": 48},
    "unpacked": {"use_dynamic_batch_size": None, "max_tokens_per_gpu": None, "micro_batch_size": 1},
}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A live run of three rollouts with two optimizer steps each, recorded."""
    folder = make_world(tmp_path_factory.mktemp("replay"))
    run_train(folder, "live", **settings(), save_debug_rollout_data=f"{folder}/dump/{{rollout_id}}.pt")
    return folder


def settings(**changes):
    return {"num_rollout": NUM_ROLLOUTS, "global_batch_size": 8, "rollout_batch_size": 4, **changes}


def replay(world, run, **changes):
    run_train(world, run, **settings(load_debug_rollout_data=f"{world}/dump/{{rollout_id}}.pt", **changes))


def assert_same_curve(world, run, reference="live", steps=2 * NUM_ROLLOUTS):
    for name in COMPARED:
        expected, got = series(world, reference, name), series(world, run, name)
        assert sorted(expected)[:steps] == sorted(got)[:steps]
        for step in sorted(expected)[:steps]:
            assert got[step] == pytest.approx(expected[step], abs=1e-4, rel=1e-4), (name, step)


def test_losses_of_the_recorded_run_are_not_trivial(world):
    """Otherwise the comparisons below would compare zeros."""
    losses = series(world, "live", "train/loss")
    assert len(losses) == 2 * NUM_ROLLOUTS
    assert max(abs(value) for value in losses.values()) > 1e-3
    assert min(series(world, "live", "train/grad_norm").values()) > 1e-2


def test_a_replay_on_the_same_runtime_is_the_same_and_starts_no_engine(world):
    replay(world, "local")
    assert_same_curve(world, "local")
    assert not (world / "local" / "logs" / "engine-0.log").exists()
    assert not any("rollout/weight_version" in row for row in metrics(world, "local"))


# Ray's trainer and its numbers are in the live run below; tests/step and tests/backends vary micro-batches.
REPLAYED = [name if name == "two-ranks" else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]


@pytest.mark.parametrize("name", REPLAYED)
def test_a_replay_elsewhere_gives_the_same_losses(world, name):
    replay(world, name, **VARIANTS[name])
    assert_same_curve(world, name)


@pytest.mark.parametrize("name", ["ray", pytest.param("two-ranks", marks=pytest.mark.slow)])
def test_a_live_seeded_run_elsewhere_starts_with_the_same_step(world, name):
    run_train(world, f"live-{name}", **settings(num_rollout=1, **VARIANTS[name]))
    assert_same_curve(world, f"live-{name}", steps=2)


def test_rollout_only_records_without_training(world):
    run_train(
        world,
        "rollout-only",
        **settings(num_rollout=2, debug_rollout_only=True),
        save_debug_rollout_data=f"{world}/only/{{rollout_id}}.pt",
    )
    assert (world / "only" / "1.pt").exists()
    assert series(world, "rollout-only", "train/loss") == {}
    assert (
        json.loads((world / "rollout-only" / "run.json").read_text())["settings"]["seed"]["source"]
        == "default"
    )

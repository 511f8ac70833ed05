"""A whole run on two machines (two Ray nodes with addresses
of their own): a trainer rank and an engine on each.
"""

import os

import pytest
from loop_helpers import make_world, metrics, run_train, series
from ray_nodes import SECOND_HOST, two_ray_nodes

NOTES_ENGINES = """
_reward = reward


async def reward(args, sample, **kwargs):
    with open("{path}", "w") as file:
        file.write(" ".join(args.engine_urls))
    return await _reward(args, sample, **kwargs)
"""

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def address():
    with two_ray_nodes() as found:
        yield found


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_ranks_and_engines_of_two_machines_learn_like_those_of_one(tmp_path, address, monkeypatch, transport):
    world = make_world(tmp_path)
    with open(world / "reward.py", "a") as file:
        file.write(NOTES_ENGINES.format(path=world / "urls"))
    sizes = {"rollout_num_gpus": 2, "num_rollout": 2, "update_weight_transport": transport}
    sizes |= {"update_weight_disk_dir": world / "weights"} if transport == "disk" else {}
    run_train(world, "one", **sizes, actor_num_gpus_per_node=2)
    monkeypatch.setitem(os.environ, "RAY_ADDRESS", address)
    done = run_train(world, "two", **sizes, actor_num_nodes=2, actor_num_gpus_per_node=1, runtime="ray")
    assert f"by the transport {transport}" in done.stderr
    urls = (world / "urls").read_text().split()
    assert len(urls) == 2 and [SECOND_HOST in url for url in urls] == [False, True]
    assert [
        row["rollout/weight_version"] for row in metrics(world, "two") if "rollout/weight_version" in row
    ][-1] == 3
    for name in ("train/loss", "train/grad_norm"):
        one, two = series(world, "one", name), series(world, "two", name)
        assert two == {step: pytest.approx(value, abs=1e-4, rel=1e-3) for step, value in one.items()}, name

"""A machine of the trainer is lost in mid-run (a Ray node): another replaces it, or fewer ranks go on."""

import os
import shutil

import pytest
from loop_helpers import make_world, run_train, series, start_train, wait_for
from patience import PATIENCE_S
from ray_nodes import SECOND_HOST, THIRD_HOST, ray_cluster

from slime.record.audit import audit
from slime.utils.files.run_file import read_run
from slime.utils.machine import shm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
SIZES = {"num_rollout": 4, "update_weight_transport": "disk"}


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """With a run that lost nothing, of two ranks on one machine."""
    world = make_world(tmp_path_factory.mktemp("machines"))
    with open(world / "reward.py", "a") as file:  # there is time to lose something
        file.write("\n_reward = reward\n\n\nasync def reward(args, sample, **kwargs):\n")
        file.write("    import asyncio\n\n    await asyncio.sleep(0.3)\n")
        file.write("    return await _reward(args, sample, **kwargs)\n")
    run_train(world, "calm", **SIZES, actor_num_gpus_per_node=2, update_weight_disk_dir=world / "calm-w")
    return world


def lose_a_machine(world, run, monkeypatch, then=lambda cluster, pid: None, **changes):
    """Runs to the end, with the second machine gone after the first step; what it said."""
    with ray_cluster() as (cluster, second):
        monkeypatch.setitem(os.environ, "RAY_ADDRESS", cluster.address)
        sizes = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 1, "runtime": "ray", **SIZES, **changes}
        process = start_train(world, run, **sizes, update_weight_disk_dir=world / f"{run}-w")
        try:
            wait_for(lambda: series(world, run, "train/loss"), process, PATIENCE_S * 4)
            cluster.remove_node(second, allow_graceful=False)
            then(cluster, process.pid)
            code = process.wait(PATIENCE_S * 8)
        finally:
            process.kill()
            process.wait()
    return code, (world / f"{run}.out").read_text()


def assert_same_losses(world, run):
    for name in ("train/loss", "train/grad_norm"):
        calm, lost = series(world, "calm", name), series(world, run, name)
        assert lost == {step: pytest.approx(value, abs=1e-4, rel=1e-3) for step, value in calm.items()}, name
    assert len(read_run(world / run).last.restarts) >= 1


def test_an_elastic_trainer_goes_on_with_the_rank_that_is_left(world, monkeypatch):
    code, said = lose_a_machine(world, "elastic", monkeypatch, elastic=True)
    assert code == 0, said[-6000:]
    assert "the trainer needs 2 ranks on 2 machine(s)" in said and "continues on 1 rank(s)" in said
    assert_same_losses(world, "elastic")


def test_copies_in_the_memory_of_the_machine_that_is_left_cost_one_step(world, monkeypatch):
    def forget(cluster, pid):
        for folder in shm.FOLDER.glob(f"slime-{pid}-*-state-?-1"):  # the second machine's memory went with it
            if (folder / "trainer.json").exists() or list(folder.glob("*.distcp")):
                shutil.rmtree(folder, ignore_errors=True)

    code, said = lose_a_machine(world, "copied", monkeypatch, forget, elastic=True, peer_copies=1)
    assert code == 0, said[-6000:]
    [first, *_] = read_run(world / "copied").last.restarts
    assert first["begins_from"].startswith("its state after step") and "cannot be read" not in said
    assert_same_losses(world, "copied")


def test_a_machine_that_joins_takes_the_place_of_the_lost_one(world, monkeypatch):
    def join(cluster, pid):
        cluster.add_node(num_cpus=1, num_gpus=0, node_ip_address=THIRD_HOST)

    code, said = lose_a_machine(world, "joined", monkeypatch, join)
    assert code == 0, said[-6000:]
    assert_same_losses(world, "joined")


def test_a_rollout_worker_of_a_lost_machine_is_replaced_and_the_samples_stay_the_same(world, monkeypatch):
    """The machine has neither a rank nor an engine."""
    sizes = {"actor_num_nodes": 1, "actor_num_gpus_per_node": 2, "rollout_workers": 2}
    code, said = lose_a_machine(world, "worked", monkeypatch, **sizes)
    assert code == 0, said[-6000:]
    assert "rollout-worker-1 ended while it had" in said and f"({SECOND_HOST}): " in said, said[-6000:]
    for name in ("train/loss", "rollout/raw_reward"):
        calm, lost = series(world, "calm", name), series(world, "worked", name)
        assert lost == {step: pytest.approx(value, abs=1e-4, rel=1e-3) for step, value in calm.items()}, name
    assert audit(world / "worked" / "record.db", finished=True).violations == []


def test_without_one_the_run_says_what_it_needs(world, monkeypatch):
    code, said = lose_a_machine(world, "ended", monkeypatch, timeouts="restart-wait=1")
    assert code == 1
    assert "error: the trainer needs 2 ranks on 2 machine(s) (--actor-num-nodes" in said
    assert "has 1 machine(s) for 1, also after --timeouts restart-wait=1" in said and "--elastic" in said

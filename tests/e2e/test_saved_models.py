"""What `--save-hf` leaves behind: the last model in a folder, and RUN/model that leads to it."""

import json

import pytest
from loop_helpers import make_world, run_train

pytestmark = pytest.mark.timeout(1200)


def weights_of(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_a_folder_without_a_number_and_without_checkpoints_gets_the_final_model(tmp_path):
    world = make_world(tmp_path)
    ended = run_train(world, "run", num_rollout=1, save_hf=world / "out" / "model")
    saved = world / "out" / "model"
    assert (saved / "README.md").is_file(), "it has a card"
    before, after = weights_of(world / "model"), weights_of(saved)
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before), "it is the trained one"
    assert (world / "run" / "model").resolve() == saved.resolve()
    assert "neither --save nor --save-hf is given" not in ended.stderr

    second = run_train(world, "second", check=False, save_hf=saved)
    assert second.returncode == 2
    assert f"--save-hf {saved} exists and holds a model that this run did not write" in second.stderr

    # The next command needs no number: here, one model for each save.
    run_train(
        world,
        "third",
        hf_checkpoint=world / "run" / "model",
        num_rollout=2,
        save_interval=1,
        save_hf=world / "third" / "hf-{rollout_id}",
    )
    models = sorted(path.name for path in (world / "third").glob("hf-*"))
    assert models == ["hf-0", "hf-1"]
    assert (world / "third" / "model").readlink().name == "hf-1"
    assert json.loads((world / "third" / "run.json").read_text())["exit"] == "finished"

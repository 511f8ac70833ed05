"""The check at the start that all hosts of a run see the files that the driver sees."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from argument_helpers import parse

from slime.cluster.checkpoints.checkpoint import write_checkpoint
from slime.cluster.host_check import check_hosts
from slime.runtime.local import LocalRuntime
from slime.utils.errors import RunStopped
from slime.utils.files.step_folders import Manifest


class AnotherHost:
    """A runtime whose second host sees `seen` of the driver's folder `root`, and nothing else below it."""

    other_hosts, driver_address = ("host1 (10.0.0.2)",), "127.0.0.1"

    def __init__(self, root: Path, seen: Path):
        self._root, self._seen = root, seen

    def ask_other_hosts(self, question, asked):
        def there(path):
            return path.replace(str(self._root), str(self._seen))

        needed = tuple(replace(one, path=there(one.path)) for one in asked.needed)
        return {"host1 (10.0.0.2)": question(replace(asked, needed=needed))}


@pytest.fixture
def world(tmp_path):
    root = tmp_path / "driver"
    for name in ("model/config.json", "prompts.jsonl", "held.jsonl", "reward.py"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text('{"input": "a", "model_type": "qwen3"}\n')
    write_checkpoint(root / "old", Manifest(3, "run", 1), {}, lambda path: path.mkdir(), 0)
    return root


def settings(root):
    return parse(
        hf_checkpoint=root / "model",
        prompt_data=f"{root}/prompts.jsonl@[0:1]",
        eval_prompt_data=["held", f"{root}/held.jsonl"],
        eval_interval=1,
        rollout_global_dataset=True,
        custom_rm_path=f"{root}/reward.py:reward",
        run_dir=root / "run",
        save=root / "ckpt",
        load=root / "old",
    )


def checkpoint_of(args):
    from slime.utils.files.step_folders import find_step

    return find_step(args.load)


def test_a_host_that_shares_nothing_is_named_with_every_folder_and_both_ways_out(world, tmp_path):
    args = settings(world)
    with pytest.raises(RunStopped) as raised:
        check_hosts(args, AnotherHost(world, tmp_path / "nothing"), checkpoint_of(args))
    told = str(raised.value)
    assert "Host host1 (10.0.0.2) does not see all files of this run:" in told
    for flag in ("--run-dir", "--save", "--load", "--hf-checkpoint"):
        assert f"\n  {flag}: {tmp_path / 'nothing'}" in told, flag
    assert "config.json: there is no such file" in told
    assert "a folder that all hosts share" in told
    assert "A copy on each host, under the same path, is enough for all but --run-dir, --save." in told


def test_a_copy_on_each_host_is_enough_for_what_is_only_read(world, tmp_path):
    copy, args = tmp_path / "copy", settings(world)
    os.system(f"cp -r {world} {copy}")
    with pytest.raises(RunStopped) as raised:
        check_hosts(args, AnotherHost(world, copy), checkpoint_of(args))
    shown = [line.split(":")[0].strip() for line in str(raised.value).splitlines() if line.startswith("  ")]
    assert shown == ["--run-dir", "--save"]
    (copy / "model" / "config.json").write_text("{}")
    with pytest.raises(RunStopped, match=r"config.json: it has 2 bytes, and 38 on the driver"):
        check_hosts(args, AnotherHost(world, copy), checkpoint_of(args))


def test_hosts_that_share_the_folder_pass_and_no_token_stays(world):
    args = settings(world)
    check_hosts(args, AnotherHost(world, world), checkpoint_of(args))
    assert not list(world.rglob(".slime-host-check-*"))
    assert (world / "run").is_dir() and (world / "ckpt").is_dir()


def test_the_local_runtime_writes_no_token(world, monkeypatch):
    monkeypatch.setattr("slime.cluster.host_check.shared_folders", None)  # would raise
    check_hosts(settings(world), LocalRuntime(world / "run", "slime-1-test"), None)


def test_a_host_that_does_not_answer_is_named(world):
    class Silent(AnotherHost):
        def ask_other_hosts(self, question, needed):
            return {"host1 (10.0.0.2)": TimeoutError("no answer within 5 s (--timeouts host)")}

    with pytest.raises(RunStopped, match=r"Host host1 \(10.0.0.2\) could not check .* no answer within 5 s"):
        check_hosts(settings(world), Silent(world, world), None)


def test_a_host_with_other_packages_is_named_and_refused_unless_it_is_meant(world, caplog):
    class Older(AnotherHost):
        def ask_other_hosts(self, question, asked):
            [(host, found)] = super().ask_other_hosts(question, asked).items()
            versions = {**found.facts.versions, "torch": "1.0"}
            facts = replace(found.facts, versions=versions, clock=found.facts.clock - 3600)
            return {host: replace(found, facts=facts)}

    args, hosts = settings(world), Older(world, world)
    with pytest.raises(RunStopped, match=r"Host host1 \(10.0.0.2\): version of torch: 1.0, and .* has "):
        check_hosts(args, hosts, checkpoint_of(args))
    assert "its clock is 3600 s off the driver's" in caplog.text
    check_hosts(args.replace(skip_preflight=["hosts"]), hosts, checkpoint_of(args))

"""Flags of the weight sync: what delta needs, what it refuses, and what has no effect without it."""

import importlib.util

import pytest
from argument_helpers import parse


@pytest.fixture
def installed(monkeypatch):
    """A set of modules that count as installed."""
    modules = {"zstandard", "xxhash", "blake3"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: object() if name in modules else None
    )
    return modules


def test_delta_takes_its_familiar_flags(installed):
    args = parse(
        update_weight_mode="delta",
        update_weight_delta_encoding="overwrite",
        update_weight_delta_checksum="adler32",
        update_weight_local_checkpoint_dir="/local/copy",
        update_weight_disk_dir="/shared",
        update_weight_disk_keep_files=True,
    )
    assert (args.update_weight_mode, args.update_weight_transport) == ("delta", "auto")
    assert parse().update_weight_mode == "full"


def test_delta_goes_through_a_folder(installed):
    assert parse(update_weight_mode="delta", update_weight_transport="disk", update_weight_disk_dir="/d")
    with pytest.raises(
        ValueError, match=r"--update-weight-mode delta .* --update-weight-transport is nccl|distributed"
    ):
        parse(update_weight_mode="delta", update_weight_transport="nccl")


def test_missing_packages_are_named_at_parse_time(installed):
    installed.discard("blake3")
    with pytest.raises(ValueError, match=r"checksum blake3 needs the package blake3.*use .*adler32"):
        parse(update_weight_mode="delta", update_weight_delta_checksum="blake3")
    installed.discard("xxhash")
    with pytest.raises(ValueError, match=r"needs the package xxhash.*pip install 'slime-rl\[delta\]'"):
        parse(update_weight_mode="delta")
    assert parse(update_weight_mode="delta", update_weight_delta_checksum="adler32")
    installed.discard("zstandard")
    with pytest.raises(ValueError, match=r"needs the package zstandard.*or use --update-weight-mode full"):
        parse(update_weight_mode="delta", update_weight_delta_checksum="adler32")
    assert parse()


def test_there_is_one_agent_for_each_external_engine(installed):
    engines = {"rollout_external_engine_addrs": ["h1:1", "h2:1"], "rollout_num_gpus": None}
    assert parse(update_weight_mode="delta", weight_agent_addrs=["h1:2", "h2:2"], **engines)
    with pytest.raises(ValueError, match=r"--weight-agent-addrs names 1 agents for 2 engines"):
        parse(update_weight_mode="delta", weight_agent_addrs=["h1:2"], **engines)
    with pytest.raises(ValueError, match=r"--weight-agent-addrs names 1 agents for 0 engines"):
        parse(update_weight_mode="delta", weight_agent_addrs=["h1:2"])


@pytest.mark.parametrize(
    "flag", ["update_weight_delta_encoding", "update_weight_local_checkpoint_dir", "weight_agent_addrs"]
)
def test_flags_of_deltas_are_refused_without_them(flag):
    value = "overwrite" if flag.endswith("encoding") else "x"
    with pytest.raises(ValueError, match=rf"--{flag.replace('_', '-')}.*--update-weight-mode delta"):
        parse("--strict", **{flag: value})

"""Where megatron-core is missing its settings are named as such, with what to install."""

import pytest
from argument_helpers import parse

from slime.arguments.passthrough import megatron_flags


@pytest.fixture(autouse=True)
def missing(monkeypatch):
    monkeypatch.setattr(megatron_flags.importlib.util, "find_spec", lambda name: None)
    megatron_flags.megatron_fields.cache_clear()
    yield
    megatron_flags.megatron_fields.cache_clear()


def test_flags_of_its_command_line(missing):
    with pytest.raises(ValueError) as caught:
        parse(
            "--swiglu",
            "--num-layers",
            "4",
            "--no-rope-fusion",
            "--moe-layer-freq",
            "[0]*1+[1]*3",
            "--rotary-base",
            "1",
        )
    told = str(caught.value)
    assert "--swiglu, --num-layers, --moe-layer-freq and 1 more are settings of Megatron's" in told
    assert "pip install 'slime-rl[megatron]'" in told and "unknown" not in told


def test_keys_of_a_file_and_every_other_mistake_in_it(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("swiglu: true\nlr: fast\nkv-lora-rank: 4\nsed: 3\nnum-rollout: x\nnorm_epsilon: 1e-5\n")
    with pytest.raises(ValueError) as caught:
        parse("--config", str(file), num_rollout=None)
    told = str(caught.value)
    assert "--swiglu, --kv-lora-rank, --norm-epsilon are settings of Megatron's. Megatron is not" in told
    assert (
        "lr in " in told and "unknown key 'sed'; did you mean 'seed'?" in told and "num-rollout in " in told
    )

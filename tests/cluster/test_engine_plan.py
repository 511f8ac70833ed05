"""The command lines of SGLang servers, from the arguments of a run; no SGLang is needed to make them."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_vision import make_vision_folder

from slime.arguments.groups.topology import plain_topology
from slime.cluster.serving.served_model import plan_engines
from slime.engines.engine_process import MEETING_POINT
from slime.runtime.placement import Slot
from slime.utils import http_utils
from slime.utils.machine.run_identity import Run


def plan_of(tmp_path, slot, run=None, **changes):
    """How one server is started."""
    base = {
        "rollout_engine": "sglang",
        "engine_threads": 1,
        "timeouts": {"engine-start": 10.0},
        "engine_topology": plain_topology("org/model", 1, 1),
        "sglang_python": "/env/bin/python",
        "sglang_options": ("--mem-fraction-static", "0.5"),
        "sglang_server_concurrency": 128,
        "dtype": "auto",
        "seed": 7,
        "deterministic_mode": False,
        "offload_rollout": False,
        "lora_rank": 0,
        "lora_sync": "merged",
        "use_rollout_routing_replay": False,
        "rollout_quantization": "none",
        "freeze_vision_tower": False,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "allow_sampling_mismatch": False,
        "loss_type": "policy_loss",
    }
    slots = slot if isinstance(slot, tuple) else (slot,)
    plans = plan_engines(SimpleNamespace(**{**base, **changes}), run or Run("id", tmp_path, "slime-x"), slots)
    return plans if isinstance(slot, tuple) else plans[0]


def words_of(tmp_path, slot, **changes):
    """What one server is started with."""
    plan = plan_of(tmp_path, slot, **changes)
    return plan.command(0, Path("ready"), 3), plan.env


def test_a_server_on_a_gpu_sees_that_gpu_alone_and_the_user_s_flags_come_last(tmp_path):
    words, env = words_of(tmp_path, Slot(0, (5,)))
    assert env["CUDA_VISIBLE_DEVICES"] == "5"
    assert words[-2:] == ["--mem-fraction-static", "0.5"]
    assert words[words.index("--dtype") + 1] == "bfloat16" and "--device" not in words


@pytest.mark.parametrize(
    "flag, changes",
    [
        ("--enable-return-routed-experts", {"use_rollout_routing_replay": True}),
        ("--enable-memory-saver", {"offload_rollout": True}),
        ("--max-running-requests", {"sglang_options": ("--speculative-algorithm", "EAGLE")}),
        ("--json-model-override-args", {"rollout_quantization": "fp8"}),
    ],
)
def test_a_server_is_started_for_what_the_run_will_ask_of_it(tmp_path, flag, changes):
    assert flag in words_of(tmp_path, Slot(0, (0,)), **changes)[0]
    assert flag not in words_of(tmp_path, Slot(0, (0,)))[0]


def test_a_cpu_machine_has_no_memory_to_save(tmp_path):
    words, _ = words_of(tmp_path, Slot(0), offload_rollout=True)
    assert "--enable-memory-saver" not in words and words[words.index("--device") + 1] == "cpu"


def test_a_server_of_fp8_weights_is_told_their_blocks_and_waits_for_them(tmp_path):
    words, _ = words_of(tmp_path, Slot(0, (0,)), rollout_quantization="fp8")
    config = json.loads(words[words.index("--json-model-override-args") + 1])["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    assert words[words.index("--load-format") + 1] == "dummy"


def test_engines_that_other_machines_reach_ask_for_the_token_of_the_run(tmp_path, monkeypatch):
    monkeypatch.delenv("SLIME_ENGINE_TOKEN", raising=False)
    run = Run("id", tmp_path, "slime-x")
    here, there = (plan_of(tmp_path, Slot(0, host=host), run) for host in ("127.0.0.1", "10.0.0.5"))
    assert here.token is None and len(there.token) > 20
    assert there.token not in str(there.command(0, Path("ready"), 3)) + str(there.env) + repr(there) + repr(
        run
    )
    assert Run("id", tmp_path, "slime-x").engine_token.at("10.0.0.5") != there.token, "a new one for each run"


def test_a_token_of_the_environment_is_for_all_engines(tmp_path, monkeypatch):
    monkeypatch.setenv("SLIME_ENGINE_TOKEN", "given")
    run = Run("id", tmp_path, "slime-x")
    assert [plan_of(tmp_path, Slot(0, host=host), run).token for host in ("127.0.0.1", "10.0.0.5")] == [
        "given"
    ] * 2
    run.engine_token.use_for("http://127.0.0.1:1/generate")
    assert http_utils.token_of("http://127.0.0.1:1/model_info") == "given"
    assert http_utils.token_of("http://127.0.0.1:2/") is None


@pytest.mark.parametrize("frozen", [{}, {"freeze_vision_tower": True}, {"lora_rank": 8}])
def test_a_server_forgets_features_of_images_where_the_tower_is_trained(tmp_path, frozen):
    model = make_vision_folder(tmp_path / "vlm", "qwen3_vl")
    topology = plain_topology(str(model), 1, 1)
    words, env = words_of(tmp_path, Slot(0, (0,)), engine_topology=topology, **frozen)
    assert env.get("SGLANG_VLM_CACHE_SIZE_MB") == (None if frozen else "0")
    assert words[words.index("--image-processor-backend") + 1] in ("pil", "torchvision")
    words, env = words_of(tmp_path, Slot(0, (0,)))
    assert "SGLANG_VLM_CACHE_SIZE_MB" not in env and "--image-processor-backend" not in words


def test_a_server_on_two_machines_is_started_on_each_and_told_where_they_meet(tmp_path):
    slots = (Slot(0, (0, 1), 0, "10.0.0.4"), Slot(0, (0, 1), 1, "10.0.0.5"))
    head, other = plan_of(tmp_path, slots, engine_topology=plain_topology("org/model", 4, 4))
    assert (head.name, other.name, other.log_path.name) == (
        "engine-0",
        "engine-0-node-1",
        "engine-0-node-1.log",
    )
    for rank, plan in enumerate((head, other)):
        words = plan.command(0, Path("ready"), 3)
        assert words[words.index("--nnodes") + 1 :][:3] == ["2", "--node-rank", str(rank)]
        assert words[words.index("--dist-init-addr") + 1] == MEETING_POINT
        assert words[words.index("--tp-size") + 1] == "4"
        assert plan.env["SGLANG_HOST_IP"] == plan.host == slots[rank].host
        assert plan.env["CUDA_VISIBLE_DEVICES"] == "0,1"


@pytest.mark.parametrize("flag", ["--enable-dp-attention", "--attn-dp-size"])
def test_attention_groups_of_one_machine_meet_at_ports_that_are_reserved(tmp_path, flag):
    words, _ = words_of(tmp_path, Slot(0, (0, 1)), sglang_options=(flag, "2"))
    assert words[words.index("--dist-init-addr") + 1] == MEETING_POINT and "--nnodes" not in words
    assert "--dist-init-addr" not in words_of(tmp_path, Slot(0, (0, 1)))[0]

"""What `slime plan` says of a whole run: memory of trainer and engine, whether they fit, time of a step."""

import json

import pytest
from argument_helpers import base_argv
from tiny_model import make_tiny_tokenizer

from slime.arguments import parse_args
from slime.cli.plan import main
from slime.preflight.machine import check_memory
from slime.preflight.run_plan import Device, RunPlan, plan_run
from slime.preflight.trainer_plan import GIB

QWEN3_4B = dict(
    model_type="qwen3",
    hidden_size=2560,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=9728,
    vocab_size=151936,
    tie_word_embeddings=True,
    max_position_embeddings=40960,
)
PARAMETERS = 4.02e9
GPU = Device(80 * GIB, True)


@pytest.fixture
def planned(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    make_tiny_tokenizer().save_pretrained(tmp_path)

    def plan(*words, device=GPU, response_tokens=None, **changes):
        changes = {"hf_checkpoint": str(tmp_path), "train_backend": "fsdp", **changes}
        return plan_run(parse_args([*base_argv(**changes), *words]), device, None, response_tokens)

    return plan


def test_fsdp_on_one_device_holds_masters_gradients_moments_and_a_copy_to_compute_with(planned):
    memory = planned().trainer
    for part, size in (("weights", 4), ("gradients", 4), ("optimizer", 8), ("copy", 2)):
        assert memory[part] == pytest.approx(size * PARAMETERS, rel=0.01)


def test_fsdp_shares_them_over_ranks_and_gathers_a_layer(planned):
    memory = planned(actor_num_gpus_per_node=8, num_gpus_per_node=9).trainer
    assert memory["optimizer"] == pytest.approx(PARAMETERS, rel=0.01)
    assert memory["copy"] == 2 * 2 * 151936 * 2560  # the embedding is the largest
    two_copies = planned(actor_num_gpus_per_node=8, num_gpus_per_node=9, fsdp_shard_size=4).trainer
    assert two_copies["optimizer"] == pytest.approx(2 * PARAMETERS, rel=0.01)


def test_adapters_and_recomputation_and_offload_need_less(planned):
    plain = planned().trainer
    assert planned(lora_rank=16).trainer["optimizer"] < 0.05 * plain["optimizer"]
    assert planned(activation_checkpointing="full").trainer["activations"] < plain["activations"]
    assert "optimizer" not in planned("--fsdp-cpu-offload").trainer
    assert planned("--optimizer-cpu-offload").trainer["optimizer"] == 0
    half = planned("--optimizer-cpu-offload", optimizer_offload_fraction=0.5).trainer["optimizer"]
    assert half == plain["optimizer"] / 2
    small = planned("--use-precision-aware-optimizer", exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16").trainer
    assert small["optimizer"] == plain["optimizer"] * 3 / 8


def test_the_embedded_engine_holds_weights_and_a_cache(planned):
    engine = planned(limits="embedded-tokens=1000").engine
    assert engine["weights"] == pytest.approx(2 * PARAMETERS, rel=0.01)
    assert engine["KV cache"] == 1000 * 2 * 36 * 8 * 128 * 2
    assert planned().engine["KV cache"] == pytest.approx(0.4 * (80 * GIB - engine["weights"]), rel=0.01)


def test_devices_that_are_shared_in_turns_hold_the_larger_side(planned):
    plan = planned("--colocate", rollout_num_gpus=None)
    assert plan.peak == max(sum(plan.trainer.values()), sum(plan.engine.values()))
    assert planned("--debug-rollout-only").trainer == {}


def test_megatron_is_planned_by_its_fullest_stage(planned):
    pytest.importorskip("megatron.core")
    memory = planned(
        "--pipeline-model-parallel-size", "2", train_backend="megatron", actor_num_gpus_per_node=2
    )
    assert set(memory.trainer) >= {"weights", "gradients", "optimizer", "activations"}


def test_more_samples_take_longer(planned):
    one, two = planned(rollout_batch_size=64), planned(rollout_batch_size=128)
    assert 0 < one.generate_s < two.generate_s
    assert 1.5 * one.train_s < two.train_s <= 2 * one.train_s, "a step has a fixed part, too"


def test_many_small_micro_batches_cost_more_than_what_they_compute(planned):
    by_sample = planned(rollout_batch_size=128, rollout_max_response_len=8, micro_batch_size=1)
    packed = planned(
        "--use-dynamic-batch-size",
        *("--max-tokens-per-gpu", "1048576"),
        rollout_batch_size=128,
        rollout_max_response_len=8,
    )
    assert by_sample.train_s == pytest.approx(3 * 256 * 0.005) and packed.train_s < by_sample.train_s


H200 = Device(139 * GIB, True, "NVIDIA H200")


def test_a_whole_step_on_an_h200_is_predicted_within_a_fifth(planned):
    """docs/performance.md: 512 responses of 950 tokens, 22.2 s generating and 22.4 training of 45.2 s."""
    words = ("--colocate", "--use-dynamic-batch-size", "--max-tokens-per-gpu", "16384")
    flags = dict(
        limits="embedded-requests=256",
        rollout_batch_size=64,
        n_samples_per_prompt=8,
        rollout_max_response_len=950,
        rollout_num_gpus=None,
    )
    plan = planned(*words, device=H200, response_tokens=950.0, **flags)
    assert plan.generate_s == pytest.approx(22.2, rel=0.2)
    assert plan.train_s == pytest.approx(22.4, rel=0.2)
    assert plan.step_s == pytest.approx(45.2, rel=0.2)
    assumed = planned(*words, device=H200, **flags)
    assert "for responses of 475 tokens" in "\n".join(assumed.lines(None))
    assert plan.generate_s > assumed.generate_s > plan.generate_s / 2, "the longest keep an engine busy"


def test_adapters_save_the_gradients_of_frozen_matrices(planned):
    flags = dict(device=H200, rollout_batch_size=512, rollout_max_response_len=1024)
    assert planned(**flags, lora_rank=16).train_s == pytest.approx(planned(**flags).train_s * 2 / 3, rel=0.1)


def test_predicted_stands_beside_measured():
    plan = RunPlan({"weights": GIB}, {"weights": GIB}, False, 2.0, 3.0, response_tokens=512)
    told = plan.against(10.0, 2 * GIB, 950)
    assert "a step 5 s, measured 10 s" in told
    assert "1.00 GiB, measured 2.00 GiB" in told
    assert told.endswith("responses of 512 tokens, measured 950")
    assert "memory" not in plan.against(10.0, None, None)


def test_the_command_reads_a_run_yaml_and_says_whether_it_fits(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    words = base_argv(hf_checkpoint=str(tmp_path))
    pairs = zip(words, [*words[1:], "--"], strict=True)
    values = {w[2:]: (v if not v.startswith("--") else True) for w, v in pairs if w.startswith("--")}
    file = tmp_path / "run.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in values.items()))
    assert main(["--config", str(file), "--gpu-gib", "24"]) == 1
    assert "does not fit: " in capsys.readouterr().out
    assert main(["--config", str(file), "--gpu-gib", "200", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


def test_a_model_that_is_not_here_is_told(capsys):
    with pytest.raises(SystemExit) as stop:
        main([*base_argv(), "--gpu-gib", "24"])
    assert stop.value.code == 2 and "no config.json there" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        (100, "100 steps: about 60 minutes, and what evaluations take"),
        (1000, "1000 steps: about 10.0 hours, and what evaluations take"),
        (1, None),
    ],
)
def test_the_time_of_a_whole_run_is_told_where_it_is_long(tmp_path, steps, said):
    make_tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_4B))
    args = parse_args(base_argv(hf_checkpoint=str(tmp_path), train_backend="fsdp", num_rollout=steps))
    plan = RunPlan({"weights": GIB}, {"weights": GIB}, False, 20.0, 16.0)
    texts = [finding.text for finding in check_memory(args, plan)]
    assert [text for text in texts if "evaluations take" in text] == ([said] if said else [])


def placed(capsys, words: str, **changes) -> list[str]:
    changes = {"hf_checkpoint": "none", "rollout_num_gpus": None, "num_gpus_per_node": None, **changes}
    changes = {"actor_num_gpus_per_node": None, "train_backend": "fsdp", **changes}
    assert main([*base_argv(**changes), "--place", *words.split()]) == 0
    return capsys.readouterr().out.splitlines()


def test_a_described_cluster_shows_what_lies_on_which_host(capsys):
    assert placed(capsys, "2x4 --colocate") == [
        "host-0: ranks 0-3 on GPU 0-3; " + "; ".join(f"engine-{i} on GPU {i}" for i in range(4)),
        "host-1: nothing",
    ]
    sizes = dict(
        actor_num_gpus_per_node=4, rollout_num_gpus=12, rollout_num_gpus_per_engine=4, colocate=False
    )
    # As many hosts as it needs, with eight GPUs each.
    assert placed(capsys, "", **sizes) == [
        "host-0: ranks 0-3 on GPU 0-3; engine-0 on GPU 4-7",
        "host-1: engine-1 on GPU 0-3; engine-2 on GPU 4-7",
    ]
    [row, *_] = json.loads("".join(placed(capsys, "4x4 --json", **sizes)))["hosts"]
    assert (row["ranks"]["3"], row["engines"]) == ([3], {})  # all GPUs of a host with four
    on_cpu = dict(actor_num_nodes=2, actor_num_gpus_per_node=2, rollout_num_gpus=3)
    assert placed(capsys, "2x0", **on_cpu) == [
        "host-0: ranks 0-1; engine-0; engine-1",
        "host-1: ranks 2-3; engine-2",
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--place 16", "--place is '16'; write hosts x GPUs of each, such as 16x8"),
        ("--place 2x4 --rollout-num-gpus 6 --actor-num-gpus-per-node 4 --no-colocate", "need 10 GPUs, but 2"),
        (
            "--gpu h200 --actor-num-nodes 2 --actor-num-gpus-per-node 7 --rollout-num-gpus 2 "
            "--num-gpus-per-node 8 --rollout-num-gpus-per-engine 2",
            "an engine would get GPUs of several machines, but --rollout-engine embedded runs on one",
        ),
    ],
)
def test_what_has_no_place_is_an_error_of_the_plan(words, message, capsys):
    changes = dict(hf_checkpoint="none", train_backend="fsdp", rollout_num_gpus=None)
    with pytest.raises(SystemExit) as stop:
        main([*base_argv(**changes, actor_num_gpus_per_node=None, num_gpus_per_node=None), *words.split()])
    assert stop.value.code == 2 and message in capsys.readouterr().err

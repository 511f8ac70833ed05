"""Rules that span flags: each refuses a combination with flag, value, reason and fix, or derives a value."""

import sys
from pathlib import Path

import pytest
from argument_helpers import base_argv, parse

from slime.arguments import explain_batch, parse_args
from slime.arguments.all_flags import all_specs
from slime.arguments.core.draft import Draft
from slime.arguments.groups.cluster import derive_offload, derive_sizes
from slime.arguments.groups.trained_sampling import replays_nucleus
from slime.arguments.groups.training import ADAM, USES_ADAM
from slime.rollout.generation.generate_request import sampling_params_of

SGLANG = {"rollout_engine": "sglang", "sglang_python": sys.executable}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_batch_size": None}, "--rollout-batch-size is required"),
        ({"hf_checkpoint": None}, "--hf-checkpoint is required"),
        ({"rollout_global_dataset": True}, "--prompt-data is required"),
        ({"rollout_max_response_len": None}, "--rollout-max-response-len is required"),
        (
            {"rollout_temperature": 0},
            "--rollout-temperature is 0: greedy decoding is not a policy RL can improve",
        ),
        ({"rollout_temperature": -1}, "--rollout-temperature is -1"),
        (
            {
                "rollout_top_p": 0.9,
                "rollout_external_engine_addrs": ["127.0.0.1:1"],
                "rollout_num_gpus": None,
            },
            "--rollout-top-p is 0.9: .*does not ask external engines for them.*--allow-sampling-mismatch",
        ),
        ({"rollout_top_k": 1}, "--rollout-top-k is 1: greedy decoding"),
        (
            {"rollout_top_p": 0.9, "loss_type": "sft_loss", "n_samples_per_prompt": 1},
            "--rollout-top-p is 0.9 with --loss-type sft_loss: .*--eval-top-p",
        ),
        (
            {"rollout_top_p": 0.9, "use_opd": True, "opd_type": "engine"},
            "--rollout-top-p is 0.9 with --opd-type engine: .*--opd-type trainer",
        ),
        ({"rollout_top_k": 0}, "--rollout-top-k is 0"),
        (
            {"rollout_max_context_len": 10, "rollout_max_prompt_len": 10},
            "--rollout-max-prompt-len is 10.*at most 9",
        ),
        (
            {"over_sampling_batch_size": 3},
            "--over-sampling-batch-size is 3, less than --rollout-batch-size 4",
        ),
        ({"num_rollout": None}, "neither --num-rollout nor --num-epoch"),
        ({"num_epoch": 2, "strict": True}, "--num-epoch is 2, but --num-rollout says how long to train"),
        ({"num_rollout": None, "num_epoch": 2}, "--num-epoch needs the shared dataset"),
        ({"loss_type": "custom_loss"}, "needs --custom-loss-function-path"),
        ({"loss_type": "sft_loss"}, "--n-samples-per-prompt is 2 with --loss-type sft_loss"),
        ({"advantage_estimator": "reinforce_plus_plus"}, "needs --normalize-advantages"),
        (
            {"kl_coef": 0.1},
            "--kl-coef is 0.1, but grpo never subtracts a KL.*--use-kl-loss --kl-loss-coef 0.1",
        ),
        (
            {"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True},
            "--kl-coef is 0.1 and --kl-loss-coef is 0.1: the KL would count twice",
        ),
        (
            {"actor_num_nodes": 2, "runtime": "local"},
            "--actor-num-nodes is 2, but --runtime local uses this machine only; use --runtime ray",
        ),
        (
            {"balance_by_flops": True, "micro_batch_size": 2},
            "--balance-by-flops .* needs --use-dynamic-batch-size",
        ),
        ({"min_lr": 1, "lr_decay_style": "cosine"}, "--min-lr is 1, more than --lr 1e-06"),
        (
            {"lr_warmup_iters": 3, "lr_decay_style": "linear"},
            "--lr-warmup-iters is 3, but the schedule ends after 3",
        ),
        ({"rm_type": "mth"}, "--rm-type is 'mth', which is no built-in reward; did you mean math"),
        ({"rm_type": "remote_rm"}, "--rm-type remote_rm needs --rm-url"),
        ({"eval_interval": 5}, "--eval-interval is 5, but there is nothing to evaluate on"),
        ({"save_interval": 5}, "--save-interval is 5, but .* only with --save or --save-hf"),
        ({"save_hf": "out/{rank}"}, "--save-hf is out/{rank}: every rollout would use the same path"),
        (
            {"save_debug_rollout_data": "x{step}.pt"},
            "--save-debug-rollout-data is x{step}.pt: not a template",
        ),
        ({"debug_rollout_only": True, "debug_train_only": True}, "leave nothing to do"),
        (
            {"debug_rollout_only": True, "load_debug_rollout_data": "{rollout_id}.pt"},
            "--load-debug-rollout-data implies --debug-train-only",
        ),
        ({"debug_train_only": True}, "--debug-train-only starts no engines.*--load-debug-rollout-data"),
        ({"actor_num_gpus_per_node": 3}, "--actor-num-gpus-per-node is 3, but --num-gpus-per-node says .* 2"),
        ({"fp8_training": True, "lora_rank": 8}, "--fp8-training with --lora-rank: layers with adapters"),
        (
            {"fp8_training": True, "tensor_model_parallel_size": 2},
            "--fp8-training with --tensor-model-parallel-size 2: .* keep one",
        ),
        ({"update_weight_transport": "disk"}, "needs --update-weight-disk-dir"),
        (
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "--rollout-num-gpus is 3, not a multiple",
        ),
    ],
)
def test_combination_is_refused_with_its_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "name", "value", "rule"),
    [
        ({}, "eps_clip_high", 0.2, "same as eps_clip"),
        ({"eps_clip": 0.3}, "eps_clip_high", 0.3, "same as eps_clip"),
        ({}, "over_sampling_batch_size", 4, "same as rollout_batch_size"),
        (
            {"n_samples_per_prompt": 1, "disable_rewards_normalization": True},
            "grpo_std_normalization",
            False,
            "a group of one sample",
        ),
        ({"rollout_max_context_len": 64}, "rollout_max_prompt_len", 63, "rollout_max_context_len - 1"),
        ({"rollout_max_context_len": 64}, "eval_max_context_len", 64, "same as rollout_max_context_len"),
        ({"use_kl_loss": True}, "ref_load", "owner/model", "taken from hf_checkpoint"),
        ({"num_steps_per_rollout": 4}, "global_batch_size", 2, "num_steps_per_rollout"),
        ({"global_batch_size": 2}, "num_steps_per_rollout", 4, "global_batch_size"),
        ({}, "global_batch_size", 8, "one optimizer step"),
        ({"global_batch_size": 4}, "lr_decay_iters", 6, "whole run"),
        ({"reward_key": "score"}, "eval_reward_key", "score", "same as reward_key"),
        ({"load_debug_rollout_data": "{rollout_id}.pt"}, "debug_train_only", True, "load_debug_rollout_data"),
        ({}, "rollout_engine", "embedded", "needs nothing"),
        ({"seed": 3}, "run_dir", str(Path("runs/model-3").absolute()), "runs/<model>-<seed>"),
        ({"colocate": True}, "offload_train", True, "colocate"),
        ({"colocate": True}, "offload_rollout", True, "colocate"),
        ({}, "offload_train", False, "do not share"),
        (
            {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 9, "balance_by_flops": True},
            "balance_data",
            True,
            "balance_by_flops",
        ),
    ],
)
def test_value_is_derived_and_says_by_which_rule(changes, name, value, rule):
    args = parse(**changes)
    assert getattr(args, name) == value
    assert args.sources[name].startswith("derived: ")
    assert rule in args.sources[name]


def test_explicit_values_are_kept():
    args = parse(eps_clip_high=0.28, colocate=True, offload_train=False, over_sampling_batch_size=8)
    assert (args.eps_clip_high, args.offload_train, args.offload_rollout) == (0.28, False, True)
    assert args.sources["offload_train"] == "command line"
    assert args.over_sampling_batch_size == 8


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.9}, {"rollout_top_k": 20}])
def test_truncated_sampling_is_trained_where_the_engine_tells_what_it_kept(cut):
    args = parse(**cut)
    assert args.rollout_engine == "embedded" and replays_nucleus(args)
    assert sampling_params_of(args)["custom_params"] == {"return_top_p_token_ids": True}
    plain = parse()
    assert not replays_nucleus(plain) and "custom_params" not in sampling_params_of(plain)


def test_sglang_gets_a_top_k_with_which_it_tells_what_it_kept():
    args = parse(rollout_top_p=0.9, **SGLANG)
    assert replays_nucleus(args) and args.rollout_top_k == 2048
    params = sampling_params_of(args)
    assert params["top_k"] == 2048 and params["custom_params"] == {"return_top_p_token_ids": True}
    assert parse(rollout_top_p=0.9, rollout_top_k=50, **SGLANG).rollout_top_k == 50
    assert parse(**SGLANG).rollout_top_k == parse(rollout_top_p=0.9).rollout_top_k == -1


@pytest.mark.parametrize("engine", [{}, SGLANG])
def test_sampling_mismatch_can_be_accepted(engine):
    args = parse(rollout_top_p=0.9, allow_sampling_mismatch=True, **engine)
    assert args.rollout_top_p == 0.9 and not replays_nucleus(args)
    assert "custom_params" not in sampling_params_of(args)


def test_truncated_sampling_is_fine_where_nothing_is_trained():
    assert parse(rollout_top_p=0.9, debug_rollout_only=True).rollout_top_p == 0.9


def test_kl_in_the_reward_is_allowed_where_it_has_an_effect():
    args = parse(advantage_estimator="reinforce_plus_plus", normalize_advantages=True, kl_coef=0.1)
    assert args.ref_load == "owner/model"


def test_custom_rollout_needs_no_model_when_nothing_is_trained():
    args = parse(hf_checkpoint=None, debug_rollout_only=True, rollout_function_path="my.rollout")
    assert args.run_dir == str(Path("runs/run-1234").absolute())


def test_batch_algebra_is_explained_in_words():
    args = parse(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=128)
    batch = "32 prompts x 8 samples = 256 = 2 optimizer steps of 128"
    assert explain_batch(args) == f"{batch}, at most {args.max_tokens_per_gpu} tokens at once"
    one = {"rollout_batch_size": 1, "n_samples_per_prompt": 1, "micro_batch_size": 1}
    assert (
        explain_batch(parse(**one, advantage_estimator="ppo"))
        == "1 prompt x 1 sample = 1 = 1 optimizer step of 1, 1 sample at once"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"global_batch_size": 100},
            "100, but 32 prompts x 8 samples = 256 = 2 optimizer steps of 100 and 56 left over.*128",
        ),
        ({"global_batch_size": 512}, "one rollout makes only 32 prompts x 8 samples = 256.*at most 256"),
        ({"num_steps_per_rollout": 3}, "256 cannot be split into 3 equal optimizer steps.*nearest: 2"),
        ({"num_steps_per_rollout": 2, "global_batch_size": 64}, "together 128 samples.*2 steps of 128"),
    ],
)
def test_batch_that_does_not_fit_is_explained(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(rollout_batch_size=32, n_samples_per_prompt=8, **changes)


NO_EFFECT_VALUES = {
    "multimodal_keys": '{"image": "images"}',
    "profile_target": "train_actor",
    "memory_recorder": "memray",
    "lora_sync": "adapter",
    "update_weight_delta_encoding": "overwrite",
    "update_weight_delta_checksum": "adler32",
    "kl_loss_type": "k3",
    "wandb_mode": "offline",
    "policy_loss_type": "sapo",
    "tis_level": "sequence",
    "tis_mode": "mask",
    "rs_level": "sequence",
    "rs_upper": 3.0,
    "policy_loss_args": "sapo_tau_pos=2",
    "reward_weights": '{"a": 1}',
    "env_args": '{"*": {"a": 1}}',
    "partial_episodes": "restart",
    "advantage_estimator": "rloo",
    "loss_reduction": "sample_mean",
    "opd_type": "trainer",
    "opd_kl": "full",
    **dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype"), "bf16"),
}
SFT = {"loss_type": "sft_loss", "n_samples_per_prompt": 1}
# What must be set beside a flag so that it has no effect.
NO_EFFECT_BESIDE = {
    name: SFT
    for name in (
        "policy_loss_type",
        "policy_loss_args",
        "custom_policy_loss_function_path",
        "use_tis",
        "use_rs",
        "use_opsm",
        "get_mismatch_metrics",
        "skip_on_policy_check",
        "logprob_diff_threshold",
        "overlong_buffer_len",
        "reward_weights",
        "use_rollout_entropy",
        "custom_pg_loss_reducer_function_path",
        "advantage_estimator",
        "rewards_normalization",
        "grpo_std_normalization",
        "keep_old_actor",
        "turn_discount",
        "use_opd",
        "use_routing_replay",
        "use_rollout_routing_replay",
    )
}
NO_EFFECT_BESIDE |= {
    name: {"loss_type": "dpo_loss", "n_samples_per_prompt": 1}
    for name in ("calculate_per_token_loss", "loss_reduction")
}
NO_EFFECT_BESIDE["colocate"] = {"rollout_external_engine_addrs": ["127.0.0.1:1"], "rollout_num_gpus": None}
NO_EFFECT_BESIDE["multimodal_keys"] = {"env": "reasoning_gym:gcd"}
FSDP_ONLY = (
    "fsdp_cpu_offload",
    "freeze_vision_tower",
    "only_train_params_name_list",
    "freeze_params_name_list",
    "share_prefix",
    "fp8_training",
    "fsdp_shard_size",
)
NO_EFFECT_BESIDE |= {name: {"train_backend": "megatron"} for name in FSDP_ONLY}


@pytest.mark.parametrize("name", [name for name, spec in all_specs().items() if spec.info.only_with])
def test_flag_without_effect_is_refused_when_given(name):
    spec = all_specs()[name]
    changes = {name: NO_EFFECT_VALUES.get(name) or {bool: True, int: 2, float: 0.5, str: "text"}[spec.kind]}
    changes |= NO_EFFECT_BESIDE.get(name, {})
    words = []
    if name == "max_tokens_per_gpu":
        changes |= {"use_dynamic_batch_size": False}
    if name == "micro_batch_size":
        changes |= {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}
    if name in (
        "use_kl_loss",
        "entropy_coef",
        "eps_clip",
        "eps_clip_high",
        "eps_clip_c",
        "use_rollout_logprobs",
    ):
        changes |= {"loss_type": "sft_loss", "n_samples_per_prompt": 1}
    if name == "eps_clip_c":
        changes |= {name: 3.0}
    if {ADAM, USES_ADAM} & set(spec.info.only_with) or name == "use_stateless_adam":
        changes |= {"optimizer": "sgd"}
    if name in ("custom_advantage_function_path", "normalize_advantages"):
        words = ["--disable-compute-advantages-and-returns"]
        changes |= {"loss_type": "custom_loss", "custom_loss_function_path": "a.b"}
    if name == "rm_url" or name.startswith("judge_"):
        changes |= {"rm_type": "math"}
    if name == "min_lr":
        changes |= {"lr": 1.0}
    if spec.info.off:
        del changes[name]
        words = [spec.info.off]
    with pytest.raises(ValueError, match=rf"(^|\n  ){spec.option} is .*, but "):
        parse(*words, "--strict", **changes)


def test_precisions_of_the_optimizer():
    small = dict(exp_avg_dtype="fp8", exp_avg_sq_dtype="bf16")
    args = parse("--optimizer-cpu-offload", "--strict", **small)
    assert (args.exp_avg_dtype, args.optimizer_offload_fraction) == ("fp8", 1.0)
    assert parse("--use-precision-aware-optimizer", main_params_dtype="fp32", **small).exp_avg_dtype == "fp8"
    with pytest.raises(ValueError, match=r"--main-params-dtype is a flag .* does not build"):
        parse("--use-precision-aware-optimizer", main_params_dtype="fp16")
    with pytest.raises(ValueError, match="only with --train-backend megatron"):
        parse("--use-precision-aware-optimizer", main_grads_dtype="bf16")


@pytest.mark.parametrize("name", ["kl_loss_coef", "micro_batch_size", "min_lr"])
def test_flag_without_effect_is_fine_at_its_neutral_value(name):
    parse(**{name: all_specs()[name].default})


def test_missing_files_are_named_with_their_flag(tmp_path):
    with pytest.raises(ValueError, match=r"--prompt-data is nowhere.jsonl: there is no such file"):
        parse("--prompt-data", "nowhere.jsonl")
    with pytest.raises(ValueError, match=r"--prompt-data is nowhere.jsonl@\[0:3\]: there is no such file"):
        parse("--prompt-data", "nowhere.jsonl@[0:3]")
    with pytest.raises(ValueError, match=r"--hf-checkpoint is ./nowhere: there is no such folder"):
        parse(hf_checkpoint="./nowhere")
    with pytest.raises(ValueError, match=r"--hf-checkpoint is .*: the folder is empty"):
        parse(hf_checkpoint=str(tmp_path))
    with pytest.raises(ValueError, match="--ref-load is /nowhere"):
        parse(use_kl_loss=True, ref_load="/nowhere")
    with pytest.raises(ValueError, match="--load is nowhere: there is no such folder"):
        parse(load="nowhere")
    with pytest.raises(ValueError, match=r"evaluation dataset 'aime' is nowhere.jsonl"):
        parse("--eval-prompt-data", "aime", "nowhere.jsonl")


def test_a_link_to_no_prompt_file_is_not_advised_to_be_itself(tmp_path):
    (tmp_path / "train.jsonl").symlink_to("moved.jsonl")
    with pytest.raises(ValueError, match=r"it is a link to moved.jsonl, where there is no file"):
        parse("--prompt-data", str(tmp_path / "train.jsonl"))


def test_prompt_file_of_another_kind_is_refused(tmp_path):
    file = tmp_path / "data.txt"
    file.touch()
    with pytest.raises(ValueError, match=r"come from .jsonl, .* or .parquet"):
        parse("--prompt-data", str(file))


def test_several_prompt_files_may_be_joined_by_commas(tmp_path):
    (tmp_path / "a.jsonl").touch()
    with pytest.raises(ValueError, match=r"--prompt-data is \S*b.jsonl: there is no such file"):
        parse("--prompt-data", f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")


def test_run_that_resumes_itself_may_start_with_nothing_to_load():
    assert parse(load="nowhere", save="nowhere").load == str(Path("nowhere").absolute())


def sizes(gpus, **given):
    """The draft after the placement rules on a machine with this many GPUs."""
    draft = Draft(all_specs())
    for name, value in given.items():
        draft.set(name, value, "command line")
    derive_sizes(draft, lambda: gpus)
    derive_offload(draft)
    return draft.actor_num_gpus_per_node, draft.rollout_num_gpus, draft.colocate, draft.offload_train


@pytest.mark.parametrize(
    ("gpus", "given", "expected"),
    [
        (0, {}, (1, 1, False, False)),
        (0, {"actor_num_gpus_per_node": 2}, (2, 1, False, False)),
        (0, {"colocate": True, "actor_num_gpus_per_node": 2}, (2, 2, True, True)),
        (1, {}, (1, 1, True, True)),
        (1, {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1}, (1, 1, True, True)),
        (1, {"debug_train_only": True}, (1, 1, False, False)),
        (1, {"debug_rollout_only": True}, (1, 1, False, False)),
        (8, {}, (8, 8, True, True)),
        (8, {"rollout_num_gpus": 6}, (2, 6, False, False)),
        (8, {"actor_num_gpus_per_node": 2}, (2, 6, False, False)),
        (8, {"actor_num_gpus_per_node": 8}, (8, 8, True, True)),
        (8, {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4}, (4, 4, False, False)),
        (8, {"colocate": True, "offload_train": False}, (8, 8, True, False)),
        (8, {"actor_num_nodes": 2, "runtime": "ray", "colocate": True}, (8, 16, True, True)),
    ],
)
def test_sizes_follow_what_is_visible(gpus, given, expected):
    assert sizes(gpus, **given) == expected


def test_rollout_without_gpus_to_spare_is_still_possible_without_sharing():
    assert sizes(1, colocate=False)[2] is False


def test_backend_follows_the_devices():
    argv = base_argv(distributed_backend=None)
    assert parse_args(argv).distributed_backend in ("gloo", "nccl")

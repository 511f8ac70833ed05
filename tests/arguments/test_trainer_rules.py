"""Flags of the trainer that contradict each other, or do nothing, are refused with the reason."""

import json
import sys

import pytest
from argument_helpers import parse


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"only_train_params_name_list": ["mlp"], "freeze_params_name_list": ["embed"]},
            "--only-train-params-name-list and --freeze-params-name-list are both set.*keep one",
        ),
        ({"lora_rank": 8, "freeze_params_name_list": ["embed"]}, "--lora-rank trains adapters only"),
        ({"lora_alpha": 16}, "--lora-alpha is 16.0, but it has an effect only with --lora-rank"),
        (
            {"lora_rank": 8, "lora_sync": "adapter", "update_weight_transport": "distributed"},
            "--lora-sync adapter with --update-weight-transport distributed: adapters are sent in memory",
        ),
        (
            {"lora_rank": 8, "lora_sync": "adapter", "update_weight_mode": "delta"},
            "--lora-sync adapter with --update-weight-mode delta: adapters are sent whole",
        ),
        (
            {
                "lora_rank": 8,
                "lora_sync": "adapter",
                "rollout_engine": "sglang",
                "sglang_python": sys.executable,
                "offload_rollout": True,
                "colocate": True,
            },
            "--lora-sync adapter with --offload-rollout on SGLang engines: they lose the model",
        ),
        (
            {"lora_rank": 8, "lora_sync": "adapter", "debug_rollout_only": True},
            "--lora-sync adapter: a run with only one stage pushes nothing",
        ),
        (
            {
                "lora_rank": 8,
                "lora_sync": "adapter",
                "rollout_engine": "sglang",
                "sglang_python": sys.executable,
                "custom_generate_function_path": "json.dumps",
            },
            "--lora-sync adapter with --custom-generate-function-path on SGLang engines",
        ),
        (
            {"tensor_model_parallel_size": 2},
            "--tensor-model-parallel-size 2 x --context-parallel-size 1 does not divide the 1 trainer ranks",
        ),
        (
            {"train_backend": "fsdp", "fsdp_shard_size": 3, "actor_num_gpus_per_node": 4},
            "--fsdp-shard-size 3 does not divide the 4 data- and context-parallel ranks .*: use a size",
        ),
        (
            {"context_parallel_size": 2, "actor_num_gpus_per_node": 2, "share_prefix": True},
            "--share-prefix with --context-parallel-size 2: shared prefixes are computed on one rank",
        ),
        (
            {
                "context_parallel_size": 2,
                "actor_num_gpus_per_node": 2,
                "loss_type": "custom_loss",
                "custom_loss_function_path": "json.dumps",
            },
            "--loss-type custom_loss needs the logits of whole samples on one rank",
        ),
    ],
)
def test_combination_of_trainer_flags_is_refused_with_its_reason(changes, message):
    with pytest.raises(ValueError, match=message):
        parse(**changes)


def test_megatrons_name_for_recomputation_is_understood():
    assert parse("--recompute-granularity", "full").activation_checkpointing == "full"
    assert parse().activation_checkpointing == "none"


def test_engines_of_an_fp8_checkpoint_may_lie_further_apart_from_the_trainer(tmp_path):
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert parse(hf_checkpoint=str(tmp_path)).logprob_diff_threshold == 0.2
    assert parse(hf_checkpoint=str(tmp_path), logprob_diff_threshold=0.1).logprob_diff_threshold == 0.1
    (tmp_path / "config.json").write_text("{}")
    assert parse(hf_checkpoint=str(tmp_path)).logprob_diff_threshold is None

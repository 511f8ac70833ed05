"""Megatron's own flags: read from its dataclasses, typed, refused where something else decides."""

import pytest
from argument_helpers import base_argv, parse

from slime.arguments import parse_args
from slime.arguments.passthrough.megatron_flags import megatron_fields

pytest.importorskip("megatron")


def megatron(*words):
    return parse("--train-backend", "megatron", *words)


def test_fields_of_its_dataclasses_are_flags():
    args = megatron(
        "--moe-router-bias-update-rate",
        "0.01",
        "--attention-softmax-in-fp32",
        "--num-layers=4",
        "--bucket-size",
        "99",
    )
    assert args.megatron_config == {
        "moe_router_bias_update_rate": 0.01,
        "attention_softmax_in_fp32": True,
        "num_layers": 4,
        "bucket_size": 99,
    }


def test_familiar_spellings_are_known():
    args = megatron(
        "--swiglu", "--disable-bias-linear", "--norm-epsilon", "1e-6", "--no-masked-softmax-fusion"
    )
    assert args.megatron_config == {
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "layernorm_epsilon": 1e-6,
        "masked_softmax_fusion": False,
    }


def test_flags_of_scripts_that_describe_the_model_are_known():
    words = (
        "--vocab-size 151936 --rotary-base 1e6 --untie-embeddings-and-output-weights --group-query-attention"
    )
    words += (
        " --position-embedding-type rope --decoder-last-pipeline-num-layers 3 --moe-layer-freq [0]*1+[1]*2"
    )
    assert megatron(*words.split()).megatron_config == {
        "vocab_size": 151936,
        "rotary_base": 1e6,
        "untie_embeddings_and_output_weights": True,
        "group_query_attention": True,
        "position_embedding_type": "rope",
        "num_layers_in_last_pipeline_stage": 3,
        "moe_layer_freq": [0, 1, 1],
    }


def test_table_is_read_without_importing_the_package():
    assert len(megatron_fields()) > 200
    assert "--params-dtype" not in megatron_fields()  # no word can express a dtype


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--moe-router-bias-update-rat", "0.1"), "did you mean --moe-router-bias-update-rate"),
        (("--moe-router-load-balancing-type", "sinkhorn"), "there are none, aux_loss, seq_aux_loss"),
        (("--use-routing-replay", "--use-rollout-logprobs"), "nothing is recorded"),
        (
            ("--use-routing-replay", "--loss-type", "custom_loss", "--custom-loss-function-path", "a.b"),
            "only with --loss-type policy_loss",
        ),
        (("--num-layers", "four"), "--num-layers is 'four': megatron-core expects int"),
        (("--num-layers",), "takes one value, found 0"),
        (("--moe-layer-freq", "[0]*3+print()"), r"write a number, or a list of 0 and 1"),
        (("--decoupled-lr", "1e-3"), "all parameters have one rate"),
        (
            (
                *("--use-precision-aware-optimizer", "--main-grads-dtype", "bf16"),
                "--accumulate-allreduce-grads-in-fp32",
            ),
            "gradients add up in one precision; keep one of them",
        ),
        (("--attention-softmax-in-fp32", "yes"), "is a switch and takes no value"),
        (("--fp16",), "--fp16 cannot be given: --dtype decides it"),
        (("--mtp-num-layers", "1", "--strict"), "given without --enable-mtp-training"),
        (("--lora-rank", "4", "--enable-mtp-training"), "MTP heads have none: remove --enable-mtp-training"),
        (
            (
                "--loss-type",
                "custom_loss",
                "--custom-loss-function-path",
                "a.b",
                "--context-parallel-size",
                "2",
            ),
            "needs the logits of whole samples on one rank",
        ),
        (("--megatron-config", '{"lr": 1}'), "give each field as a flag of its own"),
    ],
)
def test_mistakes_are_named(words, message):
    with pytest.raises(ValueError, match=message):
        megatron(*words)


def test_flag_of_megatron_without_megatron_is_refused():
    with pytest.raises(
        ValueError, match="--moe-z-loss-coeff is a flag of Megatron's, but --train-backend is fsdp"
    ):
        parse("--moe-z-loss-coeff", "0.1", train_backend="fsdp")
    with pytest.raises(ValueError, match="only --train-backend megatron reads it"):
        parse("--sequence-parallel", train_backend="fsdp")
    assert parse("--use-rollout-routing-replay", train_backend="fsdp").use_rollout_routing_replay


def test_a_flag_of_megatron_names_the_trainer(tmp_path):
    assert parse().train_backend == "fsdp"
    for words in (["--moe-z-loss-coeff", "0.1"], ["--pipeline-model-parallel-size", "1"]):
        args = parse(*words)
        assert args.train_backend == "megatron"
        assert any(f"{words[0]} is a flag of Megatron's" in warning for warning in args.warnings)
    file = tmp_path / "run.yaml"
    file.write_text("num-layers: 4\n")
    assert parse("--config", str(file)).train_backend == "megatron"


def test_flags_of_a_package_that_is_missing_say_what_to_install(monkeypatch):
    monkeypatch.setattr("slime.arguments.parser.megatron_fields", dict)
    monkeypatch.setattr("slime.arguments.passthrough.megatron_flags.megatron_fields", dict)
    with pytest.raises(ValueError, match=r"--moe-z-loss-coeff.*pip install 'slime-rl\[megatron\]'"):
        parse("--moe-z-loss-coeff", "0.1")


def test_keys_of_a_file_are_flags_too(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("train-backend: megatron\nmoe-router-bias-update-rate: 0.5\nmoe_enable_deepep: true\n")
    args = parse("--config", str(file), "--moe-router-bias-update-rate", "0.25")
    assert args.megatron_config == {"moe_router_bias_update_rate": 0.25, "moe_enable_deepep": True}


def test_one_replica_is_the_default_number_of_ranks_on_cpu(monkeypatch):
    monkeypatch.setattr("slime.arguments.groups.cluster.visible_gpus", lambda: 0)
    words = base_argv(actor_num_gpus_per_node=None, num_gpus_per_node=None)
    sizes = ["--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "3"]
    args = parse_args([*words, "--train-backend", "megatron", *sizes])
    assert args.actor_num_gpus_per_node == 6

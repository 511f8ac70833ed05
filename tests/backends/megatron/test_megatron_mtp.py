"""MTP heads train beside the policy, on every layout, as if transformers computed them.

Their loss is that of transformers' layers, and the policy is what it would be without them.
"""

import pytest
import torch

pytest.importorskip("megatron.core")

from megatron_families import MTP, families_of, make_checkpoint, mtp_log_probs, samples_of_tests
from megatron_helpers import GRPO, end_groups, exported, in_processes, megatron_args, training_step

from slime.backends.megatron.config import check_mtp, read_hf_config, transformer_config

pytestmark = [pytest.mark.megatron, pytest.mark.timeout(1800)]

ON = dict(enable_mtp_training=True)
LAYOUTS = {
    "tp2 sp": dict(tp=2, sp=True),
    "pp2": dict(pp=2),
    "pp2 recompute": dict(pp=2, activation_checkpointing="full"),
    "ep2": dict(ep=2),
}
# The heads of a Qwen3.5 are those of a Qwen3-Next, which runs on two ranks.
SPLIT = [name for name in MTP if not name.startswith("qwen3_5")]
TWO = [f"{name} {layout}" for name in SPLIT for layout in LAYOUTS if (name, layout) != ("mimo", "ep2")]


def train_with_mtp(rank: int, world_size: int, cases: dict[str, tuple[str, dict]]) -> dict:
    """For each case the MTP loss on the samples of the tests, then three GRPO steps without clipping."""
    from trainer_helpers import random_samples

    from slime.backends.base import Denominators, Loss
    from slime.backends.megatron import create_backend
    from slime.backends.shared.microbatch import build_micro_batches
    from slime.batch.convert import samples_to_batch

    results = {}
    for name, (model, settings) in cases.items():
        end_groups()
        # Clipping would couple policy and heads: the norm of the gradients is one.
        args = megatron_args(model, **(GRPO | dict(optimizer="sgd", clip_grad=0.0) | settings))
        backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
        found = {"before": exported(backend)}
        mbs = build_micro_batches(samples_to_batch(args, samples_of_tests()), [[0, 3, 4], [1, 2], [5]])
        nothing = Loss(fn=lambda out, mb: (0.0 * out.log_probs.sum(), {}))
        backend.args = args.replace(lr=0.0)
        stats = backend.train_step(mbs, nothing, Denominators(rollouts=1, tokens=1.0))
        found["loss"] = stats.metrics.get("mtp_loss")
        backend.args = args
        steps = training_step(backend, args, random_samples(5, 3, vocab=127)).run().steps
        found["steps"] = [(step["train/loss"], step.get("train/mtp_loss")) for step in steps]
        results[name] = found | {"after": exported(backend)}
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(scope="module")
def models(request, folder):
    return {name: make_checkpoint(folder, name)[0] for name in families_of(request, MTP)}


@pytest.fixture(scope="module")
def one(folder, models):
    cases = {name: (model, ON) for name, model in models.items()}
    cases |= {f"{name} off": (model, {}) for name, model in models.items()}
    return in_processes(1, train_with_mtp, folder, cases)


@pytest.fixture(scope="module")
def two(folder, models):
    cases = {
        name: (models[name.split()[0]], ON | LAYOUTS[name.split(maxsplit=1)[1]])
        for name in TWO
        if name.split()[0] in models
    }
    return in_processes(2, train_with_mtp, folder, cases)


@pytest.mark.parametrize("name", MTP)
def test_mtp_loss_is_that_of_transformers_layers(folder, one, name):
    masks = [torch.tensor(sample.loss_mask) for sample in samples_of_tests()]
    log_probs = mtp_log_probs(folder, name)
    expected = -sum((lp.nan_to_num() * mask).sum() for lp, mask in zip(log_probs, masks, strict=True))
    assert one[name]["loss"] == pytest.approx(
        float(expected) / sum(int(mask.sum()) for mask in masks), abs=1e-5
    )


@pytest.mark.parametrize("name", MTP)
def test_policy_trains_as_it_would_without_mtp_heads(one, name):
    on, off = one[name], one[f"{name} off"]
    assert [loss for loss, _ in on["steps"]] == [loss for loss, _ in off["steps"]]
    assert all(torch.equal(on["after"][key], tensor) for key, tensor in off["after"].items())


@pytest.mark.parametrize("name", MTP)
def test_mtp_heads_are_exported_and_learn(one, name):
    prefix = MTP[name][0]
    heads = {key for key in one[name]["before"] if key.startswith(prefix)}
    assert heads and heads == one[name]["before"].keys() - one[f"{name} off"]["before"].keys()
    still = {key for key in heads if torch.equal(one[name]["before"][key], one[name]["after"][key])}
    assert all("correction_bias" in key or "indexer" in key for key in still)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_the_same_mtp_heads(folder, one, two, name):
    from safetensors.torch import load_file

    family = name.split()[0]
    hub, expected = load_file(folder / family / "model.safetensors"), one[family]
    assert two[name]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    for (loss, heads), (expected_loss, expected_heads) in zip(
        two[name]["steps"], expected["steps"], strict=True
    ):
        assert (loss, heads) == pytest.approx((expected_loss, expected_heads), abs=2e-5)
    assert all(torch.equal(tensor, hub[key]) for key, tensor in two[name]["before"].items())
    for key, tensor in expected["after"].items():
        torch.testing.assert_close(
            two[name]["after"][key], tensor, rtol=0, atol=1e-5, msg=lambda m, k=key: f"{k}: {m}"
        )


def test_number_of_mtp_heads_that_contradicts_the_checkpoint_names_both(models):
    args = megatron_args(models["mimo"], **ON, megatron_config={"mtp_num_layers": 2})
    with pytest.raises(
        ValueError, match=r"--mtp-num-layers is 2, but the config of --hf-checkpoint .* says 1"
    ):
        transformer_config(args, read_hf_config(models["mimo"]), torch.float32, torch.device("cpu"))


def test_mtp_heads_that_cannot_be_trained_are_refused(folder, models):
    plain = make_checkpoint(folder, "glm4")[0]
    with pytest.raises(ValueError, match="has no MTP heads"):
        check_mtp(megatron_args(plain, **ON), read_hf_config(plain))
    with pytest.raises(ValueError, match="--context-parallel-size 1"):
        check_mtp(megatron_args(models["mimo"], **ON, cp=2), read_hf_config(models["mimo"]))
    config = read_hf_config(models["qwen3_5"])
    config.mtp_num_hidden_layers = 2
    with pytest.raises(ValueError, match="2 MTP layers behind one projection"):
        check_mtp(megatron_args(models["qwen3_5"], **ON), config)

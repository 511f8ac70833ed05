"""Policy losses, corrections, reductions and checks as the trainer runs them:
invariant under packing, and loud when wrong.
"""

import math

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import (
    backend_of,
    engine_samples,
    random_samples,
    train,
    trainer_args,
)

from slime.backends.base import NonFiniteStepError
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.catalog.policy_losses import POLICY_LOSSES
from slime.step.training_step import TrainingStep
from slime.utils.errors import RunStopped
from slime.utils.plugin_errors import PluginError


def weights_of(backend):
    return torch.cat([gather_full(p.data).flatten() for p in backend.model.lm.parameters()])


CORRECTIONS = {
    "token weights": dict(use_tis=True),
    "sequence mask and veto": dict(
        use_tis=True, tis_level="sequence", tis_mode="mask", use_rs=True, rs_level="geometric", rs_veto=0.01
    ),
    "sequence drift": dict(use_opsm=True, opsm_delta=0.0, get_mismatch_metrics=True),
    "constant": dict(loss_reduction="constant", rollout_max_response_len=9),
    "sample mean": dict(loss_reduction="sample_mean"),
}


@pytest.mark.parametrize("setting", [*POLICY_LOSSES, *CORRECTIONS])
def test_two_steps_do_not_depend_on_micro_batches(model, setting):
    changes = CORRECTIONS.get(setting) or {"policy_loss_type": setting}
    changes |= {"optimizer": "sgd", "lr": 0.3, "clip_grad": 0.0, "global_batch_size": 4}
    outcomes = []
    for packing in ({"micro_batch_size": 1}, {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 64}):
        args = trainer_args(model, **changes, **packing)
        backend = backend_of(args)
        metrics = train(backend, args, engine_samples(backend, args, noise=0.3))
        outcomes.append((weights_of(backend), {k: v for k, v in metrics.items() if k.startswith("train/")}))
    (first, first_metrics), (second, second_metrics) = outcomes
    torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-6)
    assert first_metrics == pytest.approx(second_metrics, rel=1e-4, abs=1e-5)


def test_a_constant_denominator_divides_every_token_alike(model):
    args = trainer_args(
        model, advantage_estimator="dr_grpo", loss_reduction="constant", rollout_max_response_len=10
    )
    samples = random_samples(2, 4)
    metrics = train(backend_of(args), args, samples)
    rewards = samples_to_batch(args, samples)["rewards"]
    expected = -sum(r * sum(s.loss_mask) for r, s in zip(rewards, samples, strict=True)) / 10 / len(samples)
    assert metrics["train/pg_loss"] == pytest.approx(expected, rel=1e-4)
    assert metrics["train/ois"] == pytest.approx(1.0)


def test_a_sample_mean_counts_siblings_apart(model):
    samples = random_samples(2, 4)
    for sample in samples:
        sample.rollout_id = sample.group_index * 2 + (sample.index % 4 == 0)  # three siblings and one alone
    args = trainer_args(model, loss_reduction="sample_mean")
    metrics = train(backend_of(args), args, samples)
    rewards = samples_to_batch(args, samples)["rewards"]
    assert sum(rewards) != 0
    assert metrics["train/pg_loss"] == pytest.approx(-sum(rewards) / len(samples), rel=1e-4, abs=1e-6)


def test_weights_effective_sample_size_and_difference_are_those_of_the_obvious_computation(model):
    args = trainer_args(model, use_tis=True, tis_clip=1.2, get_mismatch_metrics=True)
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    exact = [s.rollout_log_probs for s in samples]
    noisy = engine_samples(backend, args, noise=0.4)
    metrics = train(backend, args, noisy)
    means = {"ratio": 0.0, "square": 0.0, "difference": 0.0, "clipped": 0.0}
    for sample, train_log_probs in zip(noisy, exact, strict=True):
        logs = [
            t - r
            for t, r, m in zip(train_log_probs, sample.rollout_log_probs, sample.loss_mask, strict=True)
            if m
        ]
        ratios = [math.exp(x) for x in logs]
        share = 1 / len(logs) / len(noisy)
        means["ratio"] += sum(ratios) * share
        means["square"] += sum(r * r for r in ratios) * share
        means["difference"] += sum(map(abs, logs)) * share
        means["clipped"] += sum(r > 1.2 for r in ratios) * share
    assert metrics["train/tis"] == pytest.approx(means["ratio"], rel=1e-4)
    assert metrics["train/tis_clipfrac"] == pytest.approx(means["clipped"], rel=1e-4)
    assert metrics["train/train_rollout_logprob_abs_diff"] == pytest.approx(means["difference"], rel=1e-4)
    assert metrics["train/ess"] == pytest.approx(means["ratio"] ** 2 / means["square"], rel=1e-4)
    assert metrics["train/mis_chi2_token"] == pytest.approx(means["square"] - 1, rel=1e-3)


def test_a_correction_without_engine_log_probs_is_one_error(model):
    args = trainer_args(model, use_tis=True)
    samples = random_samples(1, 2)
    for sample in samples:
        sample.rollout_log_probs = None
    with pytest.raises(ValueError, match="--use-tis: the rollout recorded no log-probs"):
        train(backend_of(args), args, samples)


def test_plug_ins_replace_the_loss_and_the_weights(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "import torch\n"
        "def loss(args, inputs):\n"
        "    return -inputs.advantages * inputs.log_probs, {'mine': inputs.mask * 2}\n"
        "def weights(*, args, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, "
        "response_lengths):\n"
        "    assert [len(x) for x in train_log_probs] == response_lengths == [len(m) for m in loss_masks]\n"
        "    return pg_loss * 0.5, loss_masks, {'half': torch.cat(loss_masks)}\n"
        "def short(args, inputs):\n"
        "    return inputs.log_probs.sum(), {}\n"
    )
    samples = random_samples(2, 2)
    args = trainer_args(model, custom_policy_loss_function_path=f"{file}:loss")
    plain = train(backend_of(args), args, samples)
    assert plain["train/mine"] == pytest.approx(2.0)
    args = trainer_args(
        model,
        custom_policy_loss_function_path=f"{file}:loss",
        use_tis=True,
        custom_tis_function_path=f"{file}:weights",
    )
    halved = train(backend_of(args), args, samples)
    assert halved["train/pg_loss"] == pytest.approx(plain["train/pg_loss"] / 2)
    assert halved["train/half"] == pytest.approx(1.0)
    args = trainer_args(model, custom_policy_loss_function_path=f"{file}:short")
    with pytest.raises(ValueError, match="return one value per token"):
        train(backend_of(args), args, samples)


REJECTING = """
import torch

def first_of_each(*, args, pg_loss, loss_masks, **_):
    kept = [mask * (torch.arange(len(mask)) == 0) for mask in loss_masks]
    return pg_loss, kept, {}

def masks(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    return lambda values: (torch.cat(loss_masks) * 7).sum() + 0 * values.sum()

def flat(*, args, pg_loss, loss_masks, **_):
    return pg_loss, torch.cat(loss_masks), {}

def column(*, args, pg_loss, loss_masks, **_):
    return pg_loss[:, None], loss_masks, {}

def everything(*, args, pg_loss, loss_masks, **_):
    return pg_loss, [torch.ones_like(mask) for mask in loss_masks], {}
"""


@pytest.mark.parametrize("reduction", ["rollout_mean", "sample_mean", "token_mean", "constant"])
def test_masks_of_a_plug_in_leave_tokens_out_of_policy_kl_and_entropy_but_not_of_denominators(
    model, tmp_path, reduction
):
    """What the rest of a sample contributed is gone from every term;
    what the sums are divided by is as it was.
    """
    file = tmp_path / "rejecting.py"
    file.write_text(REJECTING)
    other = make_tiny_model(tmp_path / "other", seed=5)
    changes = dict(
        ref_load=str(other), use_kl_loss=True, kl_loss_type="k3", kl_loss_coef=0.3, entropy_coef=0.2
    )
    changes |= dict(
        loss_reduction=reduction, rollout_max_response_len=9, optimizer="sgd", lr=0.1, micro_batch_size=3
    )
    custom = dict(use_tis=True, custom_tis_function_path=f"{file}:first_of_each")
    args = trainer_args(model, **changes, **custom)
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    batch = samples_to_batch(args, samples)
    mbs = build_micro_batches(batch, [[i] for i in range(len(samples))])
    own, ref = backend.log_probs(mbs, entropy=True), backend.log_probs(mbs, weights="ref")
    trained = [sum(s.loss_mask) for s in samples]
    tokens = {"rollout_mean": trained, "sample_mean": trained, "token_mean": [1] * len(samples)}
    per_token, count = tokens.get(reduction, [9.0] * len(samples)), len(samples)
    count = sum(trained) if reduction == "token_mean" else count
    expected = {"kl": 0.0, "entropy": 0.0, "pg": 0.0}
    for i, sample in enumerate(samples):
        weight = sample.loss_mask[0] / per_token[i] / count
        difference = (own.log_probs[i] - ref.log_probs[i])[0].item()
        expected["kl"] += weight * (math.exp(-difference) - 1 + difference)
        expected["entropy"] += weight * own.entropy[i][0].item()
        expected["pg"] += -weight * batch["rewards"][i]
    metrics = train(backend, args, samples)
    assert metrics["train/kl_loss"] == pytest.approx(expected["kl"], rel=1e-4)
    assert metrics["train/pg_loss"] == pytest.approx(expected["pg"], rel=1e-4, abs=1e-6)
    total = expected["pg"] + 0.3 * expected["kl"] - 0.2 * expected["entropy"]
    assert metrics["train/loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
    assert metrics["train/entropy_loss"] > 0  # reported over all trained tokens


def test_masks_of_a_plug_in_reach_a_custom_reducer_and_cannot_add_tokens(model, tmp_path):
    file = tmp_path / "rejecting.py"
    file.write_text(REJECTING)
    samples = random_samples(2, 4)
    changes = dict(use_tis=True, custom_pg_loss_reducer_function_path=f"{file}:masks")
    for function, kept in (
        ("first_of_each", sum(s.loss_mask[0] for s in samples)),
        ("everything", sum(sum(s.loss_mask) for s in samples)),
    ):
        # A plug-in that rejects reads use_rs itself: nothing is rejected twice.
        args = trainer_args(
            model, custom_tis_function_path=f"{file}:{function}", use_rs=True, rs_upper=1.0, **changes
        )
        metrics = train(backend_of(args), args, samples)
        assert metrics["train/pg_loss"] == pytest.approx(7 * kept / len(samples))
    for function in ("flat", "column"):
        args = trainer_args(model, custom_tis_function_path=f"{file}:{function}", use_tis=True)
        with pytest.raises(ValueError, match="one mask per sample"):
            train(backend_of(args), args, samples)


def test_the_built_in_rejection_leaves_kl_and_entropy_alone(model, tmp_path):
    changes = dict(
        ref_load=str(make_tiny_model(tmp_path / "other", seed=5)), use_kl_loss=True, kl_loss_type="k3"
    )
    losses = []
    for rejected in ({}, {"use_rs": True, "rs_upper": 1.01, "rs_lower": 0.99}):
        args = trainer_args(model, **changes, **rejected)
        backend = backend_of(args)
        losses.append(train(backend, args, engine_samples(backend, args, noise=0.4)))
    assert losses[0]["train/kl_loss"] == pytest.approx(losses[1]["train/kl_loss"], rel=1e-6)
    assert losses[0]["train/pg_loss"] != pytest.approx(losses[1]["train/pg_loss"], rel=1e-3)


def test_every_kl_loss_that_is_accepted_pulls_towards_its_own_reference(model, tmp_path):
    """Two references, two policies after a step. k1 alone gives one: it is refused when flags are read."""
    references = [str(make_tiny_model(tmp_path / f"ref{seed}", seed=seed)) for seed in (5, 6)]
    changes = dict(use_kl_loss=True, kl_loss_coef=0.5, optimizer="sgd", lr=0.1)
    for kind in ("k1", "k2", "k3", "low_var_kl", "k1 unbiased"):
        weights = []
        for reference in references:
            kl = dict(kl_loss_type=kind.split()[0], use_unbiased_kl="unbiased" in kind)
            args = trainer_args(model, ref_load=reference, **changes, **kl)
            backend = backend_of(args)
            train(backend, args, engine_samples(backend, args))
            weights.append(weights_of(backend))
        assert torch.equal(*weights) == (kind == "k1")


@pytest.mark.parametrize(
    ("kind", "engine"), [("ppo", -150.0), ("gspo", -1e30), ("sapo", -150.0), ("gmpo", -150.0)]
)
def test_a_runaway_token_does_not_end_the_run(model, kind, engine):
    """It became e^100 times as likely and was a mistake: a ratio that is infinite in fp32."""
    args = trainer_args(
        model,
        policy_loss_type=kind,
        use_rollout_logprobs=True,
        get_mismatch_metrics=True,
        use_rs=True,
    )
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    for sample in samples[:4]:
        sample.rollout_log_probs[0], sample.loss_mask[0] = engine, 1
        sample.reward = float(sample.index == 3)
    metrics = train(backend, args, samples)
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train/ratio_bounded"] > 0


def test_icepop_as_plug_in_is_the_built_in_mask(model):
    losses = []
    for changes in (
        {"tis_mode": "mask"},
        {"custom_tis_function_path": "slime.algorithms.off_policy.icepop_function"},
    ):
        args = trainer_args(model, use_tis=True, tis_clip=1.3, tis_clip_low=0.8, **changes)
        backend = backend_of(args)
        losses.append(train(backend, args, engine_samples(backend, args, noise=0.4))["train/pg_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_broken_step_names_and_saves_its_samples_and_may_be_skipped(model, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "def advantages(args, data):\n"
        "    data['advantages'] = [k.clone() for k in data['kl']]\n"
        "    data['advantages'][1][0] = float('nan')\n"
        "    data['returns'] = data['advantages']\n"
    )
    changes = {"custom_advantage_function_path": f"{file}:advantages", "run_dir": str(tmp_path)}
    samples = random_samples(1, 4)
    args = trainer_args(model, **changes)
    with pytest.raises(
        NonFiniteStepError, match=r"Samples with such terms: 1 \(advantages, pg_loss\); saved in "
    ):
        train(backend_of(args), args, samples)
    saved = torch.load(tmp_path / "nonfinite" / "rollout_0_step_0_rank_0.pt", weights_only=True)
    assert [row["sample_index"] for row in saved["samples"]] == [1]
    assert saved["samples"][0]["terms"]["log_probs"].isfinite().all()
    args = trainer_args(model, **changes, nonfinite_action="skip", global_batch_size=2)
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    assert metrics["train/nonfinite_steps"] == 1
    assert math.isfinite(metrics["train/loss"])
    assert backend.step == 1
    assert not torch.equal(weights_of(backend), before) or metrics["train/grad_norm"] == 0


def test_a_broken_reference_is_named_as_the_cause(model, tmp_path):
    (tmp_path / "hook.py").write_text(
        "def change(args, rollout_id, rollout_data):\n    rollout_data['ref_log_probs'][3][0] = "
        "float('nan')\n"
    )
    hook = f"{tmp_path}/hook.py:change"
    args = trainer_args(
        model, use_kl_loss=True, kl_loss_coef=0.1, run_dir=str(tmp_path), rollout_data_postprocess_path=hook
    )
    with pytest.raises(NonFiniteStepError, match=r"Samples with such terms: 3 \(kl\)"):
        train(backend_of(args), args, random_samples(2, 4))


def test_a_broken_supervised_step_names_the_sample_with_the_broken_log_prob(model, tmp_path):
    args = trainer_args(model, loss_type="sft_loss", run_dir=str(tmp_path))
    backend, samples = backend_of(args), random_samples(1, 4)
    for sample in samples:
        sample.tokens = [min(token, 100) for token in sample.tokens]
    samples[3].tokens[0] = 101  # only this sample reads the broken row of the input matrix
    with torch.no_grad():
        backend.model.lm.get_input_embeddings().weight[101] = float("nan")
    assert not backend.model.lm.config.tie_word_embeddings, (
        "the broken row would also be in the output matrix"
    )
    with pytest.raises(NonFiniteStepError, match=r"Samples with such terms: 3 \(log_probs\)"):
        train(backend, args, samples)


def test_a_broken_custom_loss_saves_the_samples_of_its_step(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def loss(args, batch, logits, reduce):\n    return logits.sum() * float('nan'), {}\n")
    args = trainer_args(
        model, loss_type="custom_loss", custom_loss_function_path=f"{file}:loss", run_dir=str(tmp_path)
    )
    with pytest.raises(NonFiniteStepError, match="the 4 samples of this rank are in "):
        train(backend_of(args), args, random_samples(1, 4))
    saved = torch.load(tmp_path / "nonfinite" / "rollout_0_step_0_rank_0.pt", weights_only=True)
    assert [row["sample_index"] for row in saved["samples"]] == [0, 1, 2, 3]


def test_the_unbiased_kl_is_weighted_by_the_ratio_of_the_token_whatever_the_loss(model):
    """With log-probs of engine and reference apart, the KL term does not depend
    on how the policy loss groups its ratios.
    """
    outcomes = {}
    for kind in ("ppo", "gspo", "gmpo"):
        args = trainer_args(
            model,
            policy_loss_type=kind,
            use_kl_loss=True,
            kl_loss_type="k2",
            use_unbiased_kl=True,
            use_rollout_logprobs=True,
            logprob_diff_threshold=0.0,
        )
        backend = backend_of(args)
        with torch.no_grad():
            for copy in backend.copies._copies["ref"]:
                copy.mul_(1.1)
        outcomes[kind] = train(backend, args, engine_samples(backend, args, noise=0.5))["train/kl_loss"]
    assert outcomes["gspo"] == outcomes["gmpo"] == pytest.approx(outcomes["ppo"], rel=1e-6)
    assert outcomes["ppo"] > 0


def test_old_log_probs_of_another_policy_stop_the_first_step(model, tmp_path):
    file = tmp_path / "moved.py"
    file.write_text(
        "def move(args, rollout_id, data):\n    data['log_probs'] = [x - 0.01 for x in data['log_probs']]\n"
    )
    changes = {"rollout_data_postprocess_path": f"{file}:move", "global_batch_size": 4}
    samples = random_samples(2, 4)
    with pytest.raises(RunStopped, match=r"ppo_kl_abs 0.01 and a mean ratio of 1.01.*--skip-on-policy-check"):
        train(backend_of(args := trainer_args(model, **changes)), args, samples)
    args = trainer_args(model, **changes, skip_on_policy_check=True)
    assert train(backend_of(args), args, samples)["train/ppo_kl_abs"] > 0


@pytest.mark.parametrize("reduction", ["rollout_mean", "sample_mean", "token_mean"])
@pytest.mark.parametrize("removed", [1, 3, 8])
def test_samples_without_trained_tokens_change_no_mean_and_stop_no_run(model, removed, reduction):
    args = trainer_args(
        model,
        global_batch_size=4,
        loss_reduction=reduction,
        calculate_per_token_loss=reduction == "token_mean",
        use_rollout_entropy=True,
    )
    backend = backend_of(args)
    samples = engine_samples(backend, args, noise=0.1)
    for sample in samples[:removed]:
        sample.remove_sample = True
    batch = samples_to_batch(args, samples)
    report = TrainingStep(backend, args, 0, split_for_ranks(args, batch, 1)[0]).run()
    metrics, steps = report.summary, report.steps
    if removed == 8:
        assert metrics["train/loss"] == 0 == metrics["train/grad_norm"]
        return
    first = steps[0] if removed < 4 else steps[1]
    assert first["train/ois"] == pytest.approx(1.0, abs=1e-5)
    assert 3 < first["train/entropy_loss"] < 5 and 3 < metrics["rollout/entropy"] < 5  # log 128 is 4.85
    assert 0.05 < first["train/train_rollout_logprob_abs_diff"] < 0.15  # of noise 0.1 it is 0.08 on average


@pytest.mark.parametrize(
    "flag",
    ["custom_policy_loss_function_path", "custom_advantage_function_path", "rollout_data_postprocess_path"],
)
def test_a_mistake_in_a_trainer_s_plug_in_is_named_with_its_place(model, tmp_path, flag):
    file = tmp_path / "mine.py"
    file.write_text("def mine(*args):\n    return {}['gold']\n")
    args = trainer_args(model, **{flag: f"{file}:mine"})
    option = "--" + flag.replace("_", "-")
    with pytest.raises(PluginError, match=f"{option} .* raised KeyError: 'gold'\n  at {file}:2 in mine"):
        train(backend_of(args), args, random_samples(1, 2))


def test_a_custom_advantage_of_another_length_is_named(model, tmp_path):
    file = tmp_path / "ragged.py"
    file.write_text(
        "def advantages(args, data):\n    data['advantages'] = data['returns'] = [k[1:] for k in "
        "data['kl']]\n"
    )
    args = trainer_args(model, custom_advantage_function_path=f"{file}:advantages")
    with pytest.raises(ValueError, match=r"advantages of sample 0 has \d+ values for \d+ response tokens"):
        train(backend_of(args), args, random_samples(1, 2))

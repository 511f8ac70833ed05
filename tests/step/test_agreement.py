"""Engine against trainer: whose samples are compared, what stops a run, what
is told once, and what cannot be compared.
"""

import pytest
import torch
from trainer_helpers import backend_of, engine_samples, train, trainer_args

from slime.batch.convert import samples_to_batch
from slime.step.agreement import Agreement, measure
from slime.utils.errors import RunStopped


@pytest.fixture(scope="module")
def backend(model):
    """Shared by tests whose runs stop before a step, or that only compare."""
    return backend_of(trainer_args(model))


def test_engine_and_trainer_must_agree_on_tokens_of_the_current_version(model):
    args = trainer_args(model)
    backend = backend_of(args)
    fresh = engine_samples(backend, args, version=3)
    metrics = train(backend, args, fresh, weight_version=3)
    assert metrics["train/staleness/lag_0"] == 1.0
    assert metrics["train/logprob_abs_diff/lag_0"] < 1e-5


def test_a_difference_on_fresh_tokens_stops_the_run_and_names_them(model):
    args = trainer_args(model)
    backend = backend_of(args)
    samples = engine_samples(backend, args, version=3)
    worst = next(s for s in samples if s.loss_mask[0])
    worst.rollout_log_probs[0] -= 7.0
    with pytest.raises(RunStopped) as stopped:
        train(backend, args, samples, weight_version=3)
    message = str(stopped.value)
    token = worst.tokens[-worst.response_length]
    assert f"sample {worst.index}, response position 0: token {token} of version 3" in message.splitlines()[1]
    assert "--logprob-diff-threshold 0.02" in message


def test_stale_tokens_may_differ_and_a_threshold_of_zero_never_stops(model):
    args = trainer_args(model)
    backend = backend_of(args)
    stale = engine_samples(backend, args, noise=1.0, version=2)
    metrics = train(backend, args, stale, weight_version=3)
    assert metrics["train/staleness/lag_1"] == 1.0
    assert metrics["train/logprob_abs_diff/lag_1"] > 0.1
    args = trainer_args(model, logprob_diff_threshold=0.0)
    backend = backend_of(args)
    train(backend, args, engine_samples(backend, args, noise=1.0, version=3), weight_version=3)


def shift(sample):
    sample.rollout_log_probs = [0.0, *sample.rollout_log_probs[:-1]]


@pytest.mark.parametrize(
    ("mistake", "steps"), [("temperature", 1), ("temperature", 2), ("shift", 1), ("zeros", 1)]
)
def test_samples_made_by_hand_are_checked_as_fresh(model, mistake, steps):
    """No versions: as a generate function leaves them that posts to /generate and sets the fields itself."""
    args = trainer_args(model, global_batch_size=8 // steps)
    backend = backend_of(args)
    sampler = (
        backend_of(trainer_args(model, rollout_temperature=0.5)) if mistake == "temperature" else backend
    )
    samples = engine_samples(sampler, args)
    for sample in samples:
        if mistake == "shift":
            shift(sample)
        elif mistake == "zeros":
            sample.rollout_log_probs = [0.0] * sample.response_length
    with pytest.raises(
        RunStopped, match=r"(?s)engine and trainer differ by .* of a version that was not recorded"
    ):
        train(backend, args, samples, weight_version=3)


def test_one_sample_made_by_hand_among_others_is_checked_too(model):
    args = trainer_args(model)
    backend = backend_of(args)
    samples = engine_samples(backend, args, version=3)
    samples[2].version_spans = []
    samples[2].rollout_log_probs = [x - 9.0 for x in samples[2].rollout_log_probs]
    samples[2].loss_mask = [1] * samples[2].response_length
    with pytest.raises(RunStopped, match="sample 2, response position"):
        train(backend, args, samples, weight_version=3)


def test_samples_of_a_later_step_are_checked_where_a_pass_saw_them(model):
    args = trainer_args(model, global_batch_size=4)
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    for sample in samples[4:]:
        sample.rollout_log_probs = [x - 1.0 for x in sample.rollout_log_probs]
    with pytest.raises(RunStopped, match="engine and trainer differ"):
        train(backend, args, samples, weight_version=3)


def test_a_version_that_is_no_number_does_not_hide_those_of_others(model):
    args = trainer_args(model)
    backend = backend_of(args)
    samples = engine_samples(backend, args, version=2)
    samples[0].version_spans = [("default", 0, samples[0].response_length)]
    metrics = train(backend, args, samples, weight_version=3)
    assert metrics["train/staleness/lag_1"] > 0.5 > metrics["train/staleness/lag_0"] > 0


def test_an_accepted_sampling_mismatch_does_not_switch_the_check_off(model):
    args = trainer_args(model, allow_sampling_mismatch=True)
    backend = backend_of(args)
    with pytest.raises(RunStopped, match="engine and trainer differ"):
        train(backend, args, engine_samples(backend, args, noise=1.0, version=3), weight_version=3)


def test_a_check_that_cannot_run_says_so_once(model, caplog):
    args = trainer_args(model)
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    agreement = Agreement()
    train(backend, args, samples, agreement=agreement)
    assert ["no engines got the trainer's weights" in hint for hint in agreement.hints.texts.values()] == [
        True
    ]
    for sample in samples:
        sample.rollout_log_probs = None
    agreement = Agreement()
    for _ in range(2):
        assert "train/staleness/lag_0" not in train(
            backend, args, samples, weight_version=3, agreement=agreement
        )
    (hint,) = agreement.hints.texts.values()
    assert "the samples have no rollout_log_probs" in hint and "return_logprob" in hint
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"].count(hint) == 1
    args = args.replace(logprob_diff_threshold=0.0)
    train(backend, args, samples, weight_version=3, agreement=(silent := Agreement()))
    assert not silent.hints.texts


def test_older_tokens_beyond_the_threshold_warn_and_name_the_correction(model):
    args = trainer_args(model)
    backend = backend_of(args)
    stale = engine_samples(backend, args, noise=1.0, version=1)
    agreement = Agreement()
    for _ in range(2):
        train(backend, args, stale, weight_version=3, agreement=agreement)
    apart, hint = agreement.hints.texts.values()
    assert (
        "older weights sampled (2.0 versions behind 3)" in apart and "--logprob-diff-threshold 0.02" in apart
    )
    assert "100% of the trained tokens" in hint and "2.0 versions behind" in hint and "--use-tis" in hint


@pytest.mark.parametrize("correction", ["use_tis", "use_rs", "use_rollout_logprobs"])
def test_a_chosen_correction_is_not_recommended_again(model, correction):
    args = trainer_args(model, **{correction: True})
    backend = backend_of(args)
    agreement = Agreement()
    train(backend, args, engine_samples(backend, args, version=2), weight_version=3, agreement=agreement)
    assert not agreement.hints.texts


def many(backend, args):
    """Enough tokens to tell a tendency from chance."""
    return engine_samples(backend, args, num_groups=32, group_size=4, noise=0.0)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [("temperature", "another temperature"), ("shift", "shifted by one"), ("rounding", None)],
)
def test_a_difference_below_the_threshold_that_is_no_rounding_is_told(model, backend, mistake, told):
    """With 16 bits the threshold is wide: what leans to one side, or fits the neighbour, is told below it."""
    args = trainer_args(model, logprob_diff_threshold=20.0)
    samples = many(backend, args)
    batch = samples_to_batch(args, samples)
    trainer = dict(enumerate(x.clone() for x in batch["rollout_log_probs"]))
    generator = torch.Generator().manual_seed(0)
    for i, sample in enumerate(samples):
        if mistake == "temperature":
            # An engine at temperature 0.5 is surer of what it drew, nearly always.
            trainer[i] = trainer[i] - 0.16 + 0.1 * torch.randn(len(trainer[i]), generator=generator)
        elif mistake == "shift":
            shift(sample)
        else:
            trainer[i] = trainer[i] + 0.1 * torch.randn(len(trainer[i]), generator=generator)
    agreement = Agreement()
    agreement.check(backend, args, samples_to_batch(args, samples), trainer, 3)
    hints = list(agreement.hints.texts.values())
    assert not hints if told is None else told in hints[0]


def test_sums_are_those_of_the_obvious_computation(model, backend):
    args = trainer_args(model)
    samples = engine_samples(backend, args, noise=0.5)
    for i, sample in enumerate(samples):
        sample.version_spans = [(f"run:{i}", 0, sample.response_length)] if i % 3 else []
    batch = samples_to_batch(args, samples)
    trainer = {i: torch.full((s.response_length,), -2.0) for i, s in enumerate(samples)}
    found = measure(backend, batch, trainer, 9)
    counts, totals, lags = [0.0] * 5, [0.0] * 5, 0
    for i, sample in enumerate(samples):
        lag = 9 - i if i % 3 else 0
        for value, trained in zip(sample.rollout_log_probs, sample.loss_mask, strict=True):
            counts[min(lag, 4)] += trained
            totals[min(lag, 4)] += trained * abs(-2.0 - value)
            lags += lag * trained
    assert found.counts.tolist() == counts and found.totals.tolist() == pytest.approx(totals)
    assert found.mean_lag == pytest.approx(lags / sum(counts[1:]))


def test_a_difference_that_grows_with_the_pushes_is_told_with_its_remedy(model, backend):
    packed = dict(use_dynamic_batch_size=True, max_tokens_per_gpu=2048)
    args = trainer_args(model, logprob_diff_threshold=0.4, fp8_rounding="nearest", **packed)
    agreement = Agreement()
    for version, noise in enumerate((0.0, 0.2, 0.3), 1):
        samples = engine_samples(backend, args, num_groups=32, group_size=4, noise=noise, version=version)
        train(backend, args, samples, weight_version=version, agreement=agreement)
    (hint,) = agreement.hints.texts.values()
    assert "2 weight pushes after" in hint and "a policy that the engines do not have" in hint
    assert "--fp8-rounding stochastic" in hint and "--check-weight-update-equal" in hint


def test_samples_of_a_custom_loss_are_compared_where_a_pass_saw_them(model, tmp_path):
    file = tmp_path / "own.py"
    file.write_text("def loss(args, batch, logits, sum_of_sample_mean):\n    return logits.sum() * 0.0, {}\n")
    own = dict(loss_type="custom_loss", custom_loss_function_path=f"{file}:loss")
    args = trainer_args(model, **own)
    backend = backend_of(args)
    assert (
        train(backend, args, engine_samples(backend, args), weight_version=3)["train/staleness/lag_0"] == 1.0
    )
    with pytest.raises(RunStopped, match="engine and trainer differ"):
        train(backend, args, engine_samples(backend, args, noise=1.0), weight_version=3)
    args = trainer_args(model, **own, compute_advantages_and_returns=False)
    agreement = Agreement()
    train(backend, args, engine_samples(backend, args, noise=1.0), weight_version=3, agreement=agreement)
    assert ["custom_loss runs no log-prob pass" in hint for hint in agreement.hints.texts.values()] == [True]


def test_what_is_measured_over_a_batch_is_the_sum_over_its_tokens():
    """Against a slow, obvious count: rows of no token, tokens that are not trained or name no version."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4, 0, 1, 7, 0]
    rows = {name: [torch.randn(n, generator=generator) for n in lengths] for name in ("trainer", "engine")}
    masks = [torch.randint(0, 2, (n,), generator=generator, dtype=torch.int32) for n in lengths]
    versions = [torch.randint(-1, 9, (n,), generator=generator, dtype=torch.int32) for n in lengths]
    batch = {"rollout_log_probs": rows["engine"], "loss_masks": masks, "versions": versions}
    batch["response_lengths"] = lengths
    found = measure(OneRank(), batch, dict(enumerate(rows["trainer"])), 7)

    totals, counts, lags, signed, near = [0.0] * 5, [0] * 5, 0, 0.0, {-1: [], 1: []}
    for sample, length in enumerate(lengths):
        trainer, engine = rows["trainer"][sample].tolist(), rows["engine"][sample].tolist()
        lag = [max(0, 7 - v) if v >= 0 else 0 for v in versions[sample].tolist()]
        fresh = [bool(m) and behind == 0 for m, behind in zip(masks[sample].tolist(), lag, strict=True)]
        for t in range(length):
            if masks[sample][t]:
                counts[min(lag[t], 4)] += 1
                totals[min(lag[t], 4)] += abs(trainer[t] - engine[t])
                lags += lag[t]
                signed += (trainer[t] - engine[t]) * fresh[t]
            for other in (t - 1, t + 1):
                if 0 <= other < length and fresh[t] and fresh[other]:
                    near[other - t].append(abs(trainer[t] - engine[other]))
    assert found.counts.tolist() == counts and found.totals.tolist() == pytest.approx(totals)
    assert (found.lags, found.signed) == (lags, pytest.approx(signed))
    assert found.shifted == pytest.approx([sum(n) / max(len(n), 1) for n in near.values()])
    assert measure(OneRank(), batch, {}, 7).counts.sum() == 0


class OneRank:
    """All that is asked of a backend here."""

    def sum_over_ranks(self, values):
        return values

"""Policies that are kept beside the one that trains: a moving reference, teachers, versions that sampled."""

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.backends.shared.old_policy import old_policy_of
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep


def test_the_reference_becomes_the_policy_at_its_interval_and_survives_a_resume(model, tmp_path):
    args = trainer_args(
        model,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        lr=1e-2,
        ref_update_interval=2,
        micro_batch_size=8,
    )
    backend = backend_of(args)
    kls = [train(backend, args, random_samples(2, 4), rollout_id=i)["train/kl_loss"] for i in range(4)]
    assert kls[0] == pytest.approx(0, abs=1e-7) and kls[1] > 1e-4
    assert kls[2] == pytest.approx(0, abs=1e-7) and kls[3] > 1e-4
    train(backend, args, random_samples(2, 4), rollout_id=4)
    backend.save(tmp_path / "ckpt")
    expected = train(backend, args, random_samples(2, 4), rollout_id=5)
    resumed = backend_of(args)
    resumed.load(tmp_path / "ckpt")
    got = train(resumed, args, random_samples(2, 4), rollout_id=5)
    assert got["train/kl_loss"] == expected["train/kl_loss"] > 1e-4


def test_the_reference_and_the_teacher_may_be_checkpoints_of_the_same_model(model, tmp_path):
    plain = trainer_args(model, micro_batch_size=8, lr=1e-2)
    saved = backend_of(plain)
    train(saved, plain, random_samples(2, 4))
    saved.save(tmp_path / "ckpt")
    args = trainer_args(
        model,
        use_kl_loss=True,
        ref_load=str(tmp_path / "ckpt"),
        use_opd=True,
        opd_type="trainer",
        opd_kl="sampled",
        opd_teacher_load=str(tmp_path / "ckpt"),
    )
    backend = backend_of(args)
    for tag in ("ref", "teacher"):
        with backend.copies.active(tag):
            torch.testing.assert_close(weights_of(backend), weights_of(saved), rtol=0, atol=0)
    torch.testing.assert_close(weights_of(backend), weights_of(backend_of(plain)), rtol=0, atol=0)
    other = make_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(ValueError, match="another model"):
        backend_of(trainer_args(other, use_kl_loss=True, ref_load=str(tmp_path / "ckpt")))


def test_forgetting_the_moments_makes_each_rollout_start_afresh(model):
    args = trainer_args(model, reset_optimizer_states=True, micro_batch_size=8)
    backend = backend_of(args)
    train(backend, args, random_samples(2, 4))
    train(backend, args, random_samples(2, 4))
    assert {float(state["step"]) for state in backend.optimizer.state.values()} == {1.0}


def test_an_optimizer_without_memory_starts_afresh_in_each_step(model):
    args = trainer_args(model, use_stateless_adam=True, global_batch_size=4, micro_batch_size=4)
    backend = backend_of(args)
    train(backend, args, random_samples(2, 4))
    assert {float(state["step"]) for state in backend.optimizer.state.values()} == {1.0}


def step_on_version(backend, args, kept, version, current=None):
    """Train on samples that weights of push `version` made."""
    batch = samples_to_batch(args, random_samples(2, 4))
    batch["versions"] = [torch.full((n,), version, dtype=torch.int32) for n in batch["response_lengths"]]
    data = split_for_ranks(args, batch, 1)[0]
    metrics = TrainingStep(backend, args, 0, data, weight_version=current, kept=kept).run().summary
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def kept_args(model, **changes):
    return trainer_args(
        model, keep_old_actor=True, lr=1e-2, micro_batch_size=8, logprob_diff_threshold=0, **changes
    )


def test_old_log_probs_come_from_the_version_that_sampled_the_batch(model):
    args = kept_args(model)
    backend = backend_of(args)
    kept = old_policy_of(args, backend)
    kept.note_push(1)
    first = step_on_version(backend, args, kept, 1, current=1)  # its own samples
    kept.note_push(2)
    second = step_on_version(backend, args, kept, 1, current=2)  # samples of the push before
    third = step_on_version(backend, args, kept, 2, current=3)
    assert first["train/ppo_kl_abs"] < 1e-5 and second["train/ppo_kl_abs"] > 1e-3
    assert second["rollout/log_probs"] == pytest.approx(first["rollout/log_probs"], abs=1e-6)
    assert third["rollout/log_probs"] != pytest.approx(first["rollout/log_probs"], abs=1e-3)
    kept.note_push(3)
    with pytest.raises(ValueError, match=r"last two pushes \(\[2, 3\]\).*version 1"):
        step_on_version(backend, args, kept, 1, current=4)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 2}, {"ref_update_interval": 3, "use_kl_loss": True}])
def test_a_resumed_run_has_the_kept_versions_of_the_one_that_saved(model, tmp_path, changes):
    args = kept_args(model, **changes)

    def rest(backend, kept):
        results = [step_on_version(backend, args, kept, 1), step_on_version(backend, args, kept, 2)]
        kept.note_push(3)
        return [*results, step_on_version(backend, args, kept, 2), weights_of(backend)]

    whole = backend_of(args)
    kept = old_policy_of(args, whole)
    for push in (1, 2):
        kept.note_push(push)
        step_on_version(whole, args, kept, push)
    whole.save(tmp_path / "ckpt")
    kept.save(tmp_path / "ckpt")
    expected = rest(whole, kept)
    resumed = backend_of(args)
    resumed.load(tmp_path / "ckpt")
    kept = old_policy_of(args, resumed)
    kept.load(tmp_path / "ckpt")
    got = rest(resumed, kept)
    assert got[:-1] == expected[:-1]  # bit for bit
    assert expected[0]["train/ppo_kl_abs"] > 1e-3
    torch.testing.assert_close(got[-1], expected[-1], rtol=0, atol=0)


def test_a_checkpoint_without_kept_versions_is_never_resumed_in_silence(model, tmp_path, caplog):
    args = kept_args(model)
    backend = backend_of(args)
    backend.save(tmp_path / "ckpt")
    kept = old_policy_of(args, backend)
    kept.load(tmp_path / "ckpt")
    assert "holds no weights of earlier pushes" in caplog.text
    kept.note_push(5)
    with pytest.raises(ValueError, match=r"\(\[5\]\).*version 4"):
        step_on_version(backend, args, kept, 4)
    kept.save(tmp_path / "ckpt")
    fresh = backend_of(args)
    fresh.load(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="push 5, but its folder rollout is missing"):
        old_policy_of(args, fresh).load(tmp_path / "ckpt")

"""Assertions of a run (--ci-test), gradient norms of another run, and dumps of what was trained on."""

import pytest
import torch
from argument_helpers import parse
from trainer_helpers import backend_of, engine_samples, train, trainer_args

from slime.backends.shared.learning_rate import learning_rate
from slime.utils.errors import RunStopped


def test_gradient_norms_are_written_and_held_against_a_later_run(model, tmp_path):
    template = str(tmp_path / "{role}_{rollout_id}_{step_id}.pt")
    dump = str(tmp_path / "train" / "{rollout_id}_{rank}.pt")
    saving = trainer_args(
        model, ci_save_grad_norm=template, ci_test=True, save_debug_train_data=dump, lr=0.01
    )
    backend = backend_of(saving)
    samples = engine_samples(backend, saving)
    norm = train(backend, saving, samples)["train/grad_norm"]
    assert torch.load(tmp_path / "actor_0_0.pt", weights_only=True) == pytest.approx(norm)
    dumped = torch.load(tmp_path / "train" / "0_0.pt", weights_only=False)
    assert dumped["rollout_data"]["tokens"] and "advantages" in dumped["rollout_data"]

    again = trainer_args(model, ci_load_grad_norm=template, lr=0.01)
    assert train(backend_of(again), again, samples)["train/grad_norm"] == pytest.approx(norm)
    torch.save(norm * 2, tmp_path / "actor_0_0.pt")
    with pytest.raises(RunStopped, match=r"the gradient norm is .*, but .*actor_0_0.pt says"):
        train(backend_of(again), again, samples)
    with pytest.raises(RunStopped, match=r"there is no .*actor_7_0.pt"):
        train(backend_of(again), again, samples, rollout_id=7)


def test_a_policy_that_is_not_its_reference_in_the_first_step_is_an_error(model):
    changes = dict(ci_test=True, use_kl_loss=True, kl_loss_type="k3", ref_load=None, kl_loss_coef=0.1)
    args = trainer_args(model, **changes)
    backend = backend_of(args)
    samples = engine_samples(backend, args)
    assert abs(train(backend, args, samples)["train/kl_loss"]) < 1e-5
    with pytest.raises(RunStopped, match=r"--ci-test: train/kl_loss .* in the first step"):
        train(_moved(backend), args, samples)
    calm = trainer_args(model, **changes, ci_disable_kl_checker=True)
    train(_moved(backend), calm, samples)


def _moved(backend):
    """The same trainer with other weights than its reference."""
    with torch.no_grad():
        for parameter in backend.model.lm.parameters():
            parameter.mul_(1.3)
    return backend


def test_flags_of_dumps_and_assertions_are_derived(tmp_path):
    args = parse("--dump-details", f"{tmp_path}/d/", "--ci-test", "--no-check-for-nan-in-loss-and-grad")
    assert args.save_debug_rollout_data == f"{tmp_path}/d/rollout_data/{{rollout_id}}.pt"
    assert args.save_debug_train_data == f"{tmp_path}/d/train_data/{{rollout_id}}_{{rank}}.pt"
    assert (args.logprob_diff_threshold, args.nonfinite_action) == (0.1, "skip")


def test_warm_up_may_be_a_share_of_the_run():
    args = parse("--lr-warmup-fraction", "0.5", "--lr", "1.0")
    assert [learning_rate(args, step, 4) for step in range(3)] == [0.5, 1.0, 1.0]
    with pytest.raises(ValueError, match="both set the length of the warm-up"):
        parse("--lr-warmup-fraction", "0.5", "--lr-warmup-iters", "2")

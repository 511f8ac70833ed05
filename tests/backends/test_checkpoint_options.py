"""What a checkpoint leaves behind: state written in the background, moments
or random state that are not read. FSDP.
"""

import pytest
import torch
from trainer_helpers import random_samples, trainer_args, weights_of

from slime.backends.fsdp import create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("process_group")


def backend_of(model, **changes):
    return create_backend(trainer_args(model, **changes), rank=0, world_size=1, device="cpu")


def train(backend, seed=0):
    batch = samples_to_batch(backend.args, random_samples(2, 2, seed=seed))
    return TrainingStep(backend, backend.args, 0, split_for_ranks(backend.args, batch, 1)[0]).run().summary


def test_a_background_save_holds_the_state_of_its_moment(model, tmp_path):
    backend = backend_of(model, async_save=True)
    train(backend)
    saved, moments = weights_of(backend), next(iter(backend.optimizer.state.values()))["exp_avg"].clone()
    backend.save(tmp_path)
    train(backend, seed=1)
    assert backend.finish_save(wait=True)
    later = weights_of(backend)
    assert any(not torch.equal(later[name], saved[name]) for name in saved)
    other = backend_of(model)
    other.load(tmp_path)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights_of(other).items())
    assert torch.equal(next(iter(other.optimizer.state.values()))["exp_avg"], moments)
    train(other, seed=1)
    assert all(torch.equal(tensor, later[name]) for name, tensor in weights_of(other).items())


def test_nothing_is_pending_without_a_background_save(model, tmp_path):
    backend = backend_of(model)
    backend.save(tmp_path)
    assert backend.finish_save(wait=False)


def test_moments_that_are_not_read_start_from_zero_while_the_schedule_goes_on(model, tmp_path):
    backend = backend_of(model)
    train(backend)
    backend.save(tmp_path)
    other = backend_of(model, no_load_optim=True)
    other.load(tmp_path)
    assert other.step == backend.step > 0
    assert not other.optimizer.state
    assert all(torch.equal(tensor, weights_of(backend)[name]) for name, tensor in weights_of(other).items())


def test_a_checkpoint_without_moments_goes_on_without_them(model, tmp_path):
    backend = backend_of(model, no_save_optim=True)
    backend.save(tmp_path)
    with pytest.raises(ValueError, match="resume with --no-load-optim"):
        backend_of(model).load(tmp_path)
    backend_of(model, no_load_optim=True).load(tmp_path)


@pytest.mark.parametrize(("leave", "same"), [(False, True), (True, False)])
def test_random_state_is_read_unless_it_is_left(model, tmp_path, leave, same):
    torch.manual_seed(3)
    backend = backend_of(model)
    backend.save(tmp_path)
    expected = torch.rand(4)
    torch.manual_seed(9)
    backend_of(model, no_load_rng=leave).load(tmp_path)
    assert torch.equal(torch.rand(4), expected) == same

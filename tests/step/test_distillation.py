"""On-policy distillation from a teacher, on one process."""

import pytest
import torch
import torch.nn.functional as F
from step_helpers import PACKINGS, SGD, hf_model, plain_log_dist, plain_log_probs
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.algorithms.distillation import full_reverse_kl, log_probs_of, top_kl


def opd_args(model, teacher, **changes):
    return trainer_args(model, use_opd=True, opd_type="trainer", opd_teacher_load=str(teacher), **changes)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "same", seed=9)


@pytest.fixture(scope="module")
def wide_teacher(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "wide", hidden=96, layers=3, seed=9)


@pytest.mark.parametrize("which", ["teacher", "wide_teacher"])
def test_the_sampled_reverse_kl_shapes_the_advantages(model, which, request):
    path = request.getfixturevalue(which)
    args = opd_args(model, path, opd_kl_coef=0.5, micro_batch_size=3, **SGD)
    samples = random_samples(2, 4)
    for sample in samples:
        sample.reward = 0.0
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    student, expert = hf_model(model), hf_model(path)
    loss = kl = 0.0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask).float()
        own = plain_log_probs(student, sample)
        difference = own.detach() - plain_log_probs(expert, sample).detach()
        kl += (difference * mask).sum() / mask.sum()
        loss = loss + (torch.exp(own - own.detach()) * 0.5 * difference * mask).sum() / mask.sum()
    (loss / len(samples)).backward()
    assert metrics["train/opd_reverse_kl"] == pytest.approx(kl.item() / len(samples), rel=1e-4)
    assert metrics["rollout/opd_reverse_kl"] == pytest.approx(kl.item() / len(samples), rel=1e-4)
    after = weights_of(backend)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("which", ["teacher", "wide_teacher"])
def test_the_full_reverse_kl_is_a_loss_of_its_own(model, which, request):
    path = request.getfixturevalue(which)
    args = opd_args(
        model, path, opd_kl="full", opd_kl_coef=0.5, micro_batch_size=3, log_probs_chunk_size=4, **SGD
    )
    samples = random_samples(2, 4)
    for sample in samples:
        sample.reward = 0.0
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    student, expert = hf_model(model), hf_model(path)
    total = 0.0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask).float()
        own, theirs = plain_log_dist(student, sample), plain_log_dist(expert, sample).detach()
        total = total + ((own.exp() * (own - theirs)).sum(-1) * mask).sum() / mask.sum()
    (0.5 * total / len(samples)).backward()
    assert metrics["train/opd_reverse_kl"] == pytest.approx(total.item() / len(samples), rel=1e-5)
    after = weights_of(backend)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kind", ["sampled", "full"])
def test_distillation_does_not_depend_on_packing(model, teacher, kind):
    outcomes = []
    for packing in PACKINGS.values():
        args = opd_args(model, teacher, opd_kl=kind, **SGD, **packing)
        backend = backend_of(args)
        metrics = train(backend, args, random_samples(3, 4))
        outcomes.append((metrics, weights_of(backend)))
    for metrics, weights in outcomes[1:]:
        torch.testing.assert_close(weights, outcomes[0][1], rtol=1e-5, atol=1e-5)
        assert metrics["train/opd_reverse_kl"] == pytest.approx(
            outcomes[0][0]["train/opd_reverse_kl"], rel=1e-5
        )


def test_a_teacher_with_another_vocabulary_is_refused(model, tmp_path):
    other = make_tiny_model(tmp_path / "other", vocab=136)
    with pytest.raises(ValueError, match=r"--opd-teacher-load .* 136 tokens .* --hf-checkpoint has 128"):
        backend_of(opd_args(model, other))


def test_log_probs_of_a_served_teacher_must_be_on_the_samples(model):
    args = trainer_args(model, use_opd=True, opd_type="engine")
    samples = random_samples(2, 4)
    with pytest.raises(ValueError, match="no teacher_log_probs"):
        train(backend_of(args), args, samples)
    for sample in samples:
        sample.teacher_log_probs = [-1.0] * sample.response_length
    assert "train/opd_reverse_kl" in train(backend_of(args), args, samples)


@pytest.mark.parametrize("kind", ["reverse_top_k", "forward_top_k"])
def test_the_kl_on_the_top_ids_of_a_served_teacher_is_a_loss_of_its_own(model, teacher, kind):
    args = trainer_args(
        model, use_opd=True, opd_type="engine", opd_kl=kind, opd_top_k=5, opd_kl_coef=0.5, micro_batch_size=3
    )
    vars(args).update(SGD, log_probs_chunk_size=4)
    samples = random_samples(2, 4)
    student, expert = hf_model(model), hf_model(teacher)
    total = 0.0
    for sample in samples:
        sample.reward = 0.0
        sample.teacher_log_probs = plain_log_probs(expert, sample).tolist()
        top = plain_log_dist(expert, sample).detach().topk(5, -1)
        sample.teacher_top_ids, sample.teacher_top_log_probs = top.indices.int().numpy(), top.values.numpy()
        own = plain_log_dist(student, sample).gather(1, top.indices)
        p = torch.cat([own.exp(), 1 - own.exp().sum(-1, keepdim=True)], -1)
        q = torch.cat([top.values.exp(), 1 - top.values.exp().sum(-1, keepdim=True)], -1)
        kl = (q * (q / p).log() if kind == "forward_top_k" else p * (p / q).log()).sum(-1)
        mask = torch.tensor(sample.loss_mask).float()
        total = total + (kl * mask).sum() / mask.sum()
    (0.5 * total / len(samples)).backward()
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    name = "train/opd_forward_kl" if kind == "forward_top_k" else "train/opd_reverse_kl"
    assert metrics[name] == pytest.approx(total.item() / len(samples), rel=1e-4)
    after = weights_of(backend)
    for name, parameter in student.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)
    samples[0].teacher_top_ids = None
    with pytest.raises(ValueError, match="1 of 8 samples have no teacher_top_ids"):
        train(backend, args, samples)


def test_the_kl_on_top_ids_equals_the_obvious_one_in_float64():
    generator = torch.Generator().manual_seed(1)
    hidden, weight = (
        torch.randn(size, generator=generator, dtype=torch.float64, requires_grad=True)
        for size in [(7, 5), (11, 5)]
    )
    teacher = torch.log_softmax(torch.randn(7, 11, generator=generator, dtype=torch.float64), -1)
    own = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    for number in (1, 4, 11):
        theirs, ids = teacher.topk(number, -1)
        got = log_probs_of(hidden, weight, ids, temperature=0.7, chunk_size=3)
        torch.testing.assert_close(got, own.gather(1, ids), rtol=1e-10, atol=1e-10)
        for forward in (False, True):
            want = []
            for row in range(7):
                p = [own[row, i].exp() for i in ids[row]] + [1 - sum(own[row, i].exp() for i in ids[row])]
                q = [value.exp() for value in theirs[row]] + [1 - sum(v.exp() for v in theirs[row])]
                if number == 11:  # nothing is left
                    p, q = p[:-1], q[:-1]
                a, b = (q, p) if forward else (p, q)
                want.append(sum(x * (x.log() - y.log()) for x, y in zip(a, b, strict=True)))
            value, want = top_kl(got, theirs, forward=forward), torch.stack(want)
            assert (value >= 0).all()
            torch.testing.assert_close(value, want, rtol=1e-9, atol=1e-12)
            grads = [torch.autograd.grad(v.sum(), (hidden, weight), retain_graph=True) for v in (value, want)]
            torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


def test_the_chunked_full_kl_equals_the_obvious_one_in_float64():
    generator = torch.Generator().manual_seed(0)
    hidden, weight, theirs, matrix = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in [(7, 5), (11, 5), (7, 3), (11, 3)]
    )
    leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    got = full_reverse_kl(*leaves, theirs, matrix, temperature=0.7, chunk_size=3)
    plain = hidden.requires_grad_(), weight.requires_grad_()
    own = torch.log_softmax(hidden @ weight.T / 0.7, -1)
    want = F.kl_div(
        torch.log_softmax(theirs @ matrix.T / 0.7, -1), own, reduction="none", log_target=True
    ).sum(-1)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    factors = torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad((got * factors).sum(), leaves),
        torch.autograd.grad((want * factors).sum(), plain),
        rtol=1e-10,
        atol=1e-10,
    )

"""What trains or stands beside a policy: critic, teacher, preference
pairs, a reference that moves. On one process.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_model import make_tiny_model
from trainer_helpers import init_process_group, random_samples, trainer_args

from slime.algorithms.distillation import full_reverse_kl
from slime.algorithms.gae import vanilla_gae
from slime.backends.base import NonFiniteStepError
from slime.backends.fsdp import create_backend
from slime.backends.fsdp.model import gather_full
from slime.backends.shared.old_policy import old_policy_of
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

PACKINGS = {
    "one by one": dict(micro_batch_size=1),
    "three": dict(micro_batch_size=3),
    "all": dict(micro_batch_size=64),
    "by tokens": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=60),
}
SGD = dict(optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module", autouse=True)
def process_group():
    init_process_group()
    yield
    dist.destroy_process_group()


def backend_of(args):
    return create_backend(args, rank=0, world_size=1, device="cpu")


def train(backend, args, samples, rollout_id=0):
    batch = samples_to_batch(args, samples)
    return TrainingStep(backend, args, rollout_id, split_for_ranks(args, batch, 1)[0]).run().summary


def weights_of(backend):
    return {name: gather_full(p.data).clone() for name, p in backend.model.lm.named_parameters()}


def hf_model(path):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")


def plain_log_dist(lm, sample):
    """[R, V] log-probs that predict the response tokens, by transformers' own forward."""
    logits = lm(torch.tensor(sample.tokens)[None]).logits[0, :-1]
    return torch.log_softmax(logits, -1)[-sample.response_length :]


def plain_log_probs(lm, sample):
    response = torch.tensor(sample.tokens[-sample.response_length :])
    return plain_log_dist(lm, sample).gather(1, response[:, None]).squeeze(1)


def plain_hidden(lm, sample):
    return lm.base_model(torch.tensor(sample.tokens)[None]).last_hidden_state[0]


def random_pairs(num_pairs=4, seed=0, margin=None):
    """Groups of two answers to one prompt: the first is the preferred one."""
    samples = random_samples(num_pairs, 2, seed=seed)
    for sample in samples:
        sample.rollout_id = sample.group_index
        sample.reward = 1.0 - sample.index % 2
        sample.rollout_log_probs = None
        sample.train_metadata = None if margin is None else {"margin": margin}
    return samples


# -- the critic ----------------------------------------------------------------------------------------------


def ppo_args(model, **changes):
    return trainer_args(model, advantage_estimator="ppo", gamma=0.9, lambd=0.8, value_clip=0.05, **changes)


def test_a_ppo_step_equals_the_obvious_computation_with_autograd(model):
    """GAE from the critic's values; the policy term and the clipped value error by plain autograd."""
    args = ppo_args(model, **SGD, critic_lr=0.5, critic_clip_grad=0.0, micro_batch_size=3)
    samples = random_samples(2, 4)
    backend = backend_of(args)
    actor, critic = weights_of(backend), weights_of(backend.critic)
    metrics = train(backend, args, samples)

    policy, judge = hf_model(model), hf_model(model)
    head = torch.nn.Parameter(critic["lm_head.weight"].clone())
    policy_loss = value_loss = 0.0
    for sample in samples:
        mask = torch.tensor(sample.loss_mask).bool()
        start = len(sample.tokens) - sample.response_length - 1
        values = (plain_hidden(judge, sample)[start:-1] @ head.T).squeeze(1)
        chosen = values[mask].detach()
        rewards = torch.zeros_like(chosen)
        rewards[-1] = sample.reward
        advantages, returns = (x[0] for x in vanilla_gae(rewards[None], chosen[None], 0.9, 0.8))
        log_probs = plain_log_probs(policy, sample)[mask]
        policy_loss = policy_loss - (torch.exp(log_probs - log_probs.detach()) * advantages).mean()
        value_loss = value_loss + (values[mask] - returns).square().mean()
    (policy_loss / len(samples)).backward()
    (value_loss / len(samples)).backward()
    assert metrics["train/critic-value_loss"] == pytest.approx(value_loss.item() / len(samples), rel=1e-5)
    after = weights_of(backend)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(actor[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)
    after = weights_of(backend.critic)
    torch.testing.assert_close(
        critic["lm_head.weight"] - after["lm_head.weight"], 0.5 * head.grad, rtol=1e-3, atol=1e-5
    )
    for name, parameter in judge.base_model.named_parameters():
        moved = critic[f"model.{name}"] - after[f"model.{name}"]
        torch.testing.assert_close(moved, 0.5 * parameter.grad, rtol=1e-3, atol=1e-5)


def test_values_do_not_depend_on_packing_and_neither_does_the_update(model):
    outcomes = []
    for packing in PACKINGS.values():
        args = ppo_args(model, **SGD, critic_clip_grad=0.0, **packing)
        backend = backend_of(args)
        metrics = train(backend, args, random_samples(4, 4))
        outcomes.append((metrics, weights_of(backend), weights_of(backend.critic)))
    for metrics, actor, critic in outcomes[1:]:
        assert metrics["rollout/values"] == pytest.approx(outcomes[0][0]["rollout/values"], abs=1e-6)
        torch.testing.assert_close(actor, outcomes[0][1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(critic, outcomes[0][2], rtol=1e-5, atol=1e-5)


def test_the_critic_learns_and_moves_with_its_own_learning_rate(model):
    args = ppo_args(model, lr=0.0, critic_lr=1e-2, critic_lr_warmup_iters=2, micro_batch_size=8)
    backend = backend_of(args)
    actor = weights_of(backend)
    runs = [train(backend, args, random_samples(2, 4), rollout_id=i) for i in range(6)]
    assert [run["train/critic-lr-pg_0"] for run in runs[:3]] == [0.005, 0.01, 0.01]
    assert runs[-1]["train/critic-value_loss"] < 0.5 * runs[0]["train/critic-value_loss"]
    torch.testing.assert_close(weights_of(backend), actor, rtol=0, atol=0)


def test_only_the_critic_trains_in_its_first_rollouts(model):
    args = ppo_args(model, num_critic_only_steps=2, micro_batch_size=8)
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, random_samples(2, 4), rollout_id=1)
    assert "train/critic-value_loss" in metrics and "train/loss" not in metrics
    torch.testing.assert_close(weights_of(backend), before, rtol=0, atol=0)
    assert "train/loss" in train(backend, args, random_samples(2, 4), rollout_id=2)


def test_a_broken_step_of_the_critic_names_its_samples_and_may_be_skipped(model, tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "def advantages(args, data):\n"
        "    data['advantages'] = [k.clone() for k in data['kl']]\n"
        "    data['returns'] = [k.clone() for k in data['kl']]\n"
        "    data['returns'][2][-1] = float('inf')\n"
    )
    changes = {
        "custom_advantage_function_path": f"{file}:advantages",
        "run_dir": str(tmp_path),
        "micro_batch_size": 8,
    }
    samples = random_samples(1, 4)
    samples[2].loss_mask = [1] * samples[2].response_length
    args = ppo_args(model, **changes)
    with pytest.raises(
        NonFiniteStepError, match=r"Samples with such terms: 2 \(returns, value_loss\); saved in "
    ):
        train(backend_of(args), args, samples)
    assert (tmp_path / "nonfinite" / "rollout_0_step_0_critic_rank_0.pt").is_file()
    args = ppo_args(model, **changes, nonfinite_action="skip")
    backend = backend_of(args)
    before = weights_of(backend.critic)
    assert train(backend, args, samples)["train/critic-nonfinite_steps"] == 1
    torch.testing.assert_close(weights_of(backend.critic), before, rtol=0, atol=0)


def test_a_critic_that_is_all_right_explains_the_variance_of_the_returns(model):
    args = ppo_args(model, lr=0.0, critic_lr=1e-2, micro_batch_size=8)
    backend = backend_of(args)
    runs = [train(backend, args, random_samples(2, 4), rollout_id=i) for i in range(30)]
    assert runs[0]["rollout/explained_variance"] < 0.3 < runs[-1]["rollout/explained_variance"] <= 1.0


@pytest.mark.parametrize("place", ["host", "device"])
def test_a_resumed_critic_continues_bit_for_bit(model, tmp_path, place):
    reference = dict(use_kl_loss=True, kl_loss_coef=0.1, ref_update_interval=1, weight_copies=place)
    args = ppo_args(model, critic_lr=1e-3, critic_lr_warmup_iters=5, **reference)
    first = backend_of(args)
    train(first, args, random_samples(2, 4, seed=1))
    first.save(tmp_path / "ckpt")
    expected = train(first, args, random_samples(2, 4, seed=2))
    second = backend_of(args)
    second.load(tmp_path / "ckpt")
    got = train(second, args, random_samples(2, 4, seed=2))
    for name in ("train/loss", "train/critic-value_loss", "train/critic-lr-pg_0", "train/critic-grad_norm"):
        assert got[name] == expected[name]
    torch.testing.assert_close(weights_of(second.critic), weights_of(first.critic), rtol=0, atol=0)


def test_a_checkpoint_without_critic_is_refused_unless_only_weights_are_taken(model, tmp_path):
    backend_of(trainer_args(model)).save(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="has no critic"):
        backend_of(ppo_args(model)).load(tmp_path / "ckpt")
    backend_of(ppo_args(model, finetune=True)).load(tmp_path / "ckpt")


def test_a_critic_of_another_size_is_refused(model, tmp_path):
    other = make_tiny_model(tmp_path / "other", hidden=32)
    with pytest.raises(
        ValueError, match=r"--critic-load .* another size.*\[128, 32\] there and \[128, 64\] here"
    ):
        backend_of(ppo_args(model, critic_load=str(other)))
    deeper = make_tiny_model(tmp_path / "deeper", layers=3)
    with pytest.raises(ValueError, match=r"--critic-load .* another size"):
        backend_of(ppo_args(model, critic_load=str(deeper)))


# -- preference pairs ----------------------------------------------------------------------------------------


def test_a_dpo_step_equals_the_obvious_computation_with_autograd(model, tmp_path):
    reference = make_tiny_model(tmp_path / "ref", seed=5)
    args = trainer_args(
        model,
        loss_type="dpo_loss",
        ref_load=str(reference),
        dpo_beta=0.3,
        dpo_label_smoothing=0.1,
        **SGD,
        micro_batch_size=4,
    )
    samples = random_pairs()
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    policy, ref = hf_model(model), hf_model(reference)

    def log_ratio(sample):
        mask = torch.tensor(sample.loss_mask).float()
        return ((plain_log_probs(policy, sample) - plain_log_probs(ref, sample).detach()) * mask).sum()

    margins = torch.stack(
        [0.3 * (log_ratio(a) - log_ratio(b)) for a, b in zip(samples[::2], samples[1::2], strict=True)]
    )
    loss = -(0.9 * F.logsigmoid(margins) + 0.1 * F.logsigmoid(-margins)).mean()
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/accuracy"] == pytest.approx((margins > 0).float().mean().item())
    assert metrics["train/margin"] == pytest.approx(margins.mean().item(), rel=1e-4)
    after = weights_of(backend)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_reward_model_step_equals_the_obvious_computation_with_autograd(model):
    args = trainer_args(model, loss_type="rm_loss", **SGD, micro_batch_size=4)
    samples = random_pairs(margin=0.25)
    backend = backend_of(args)
    before = weights_of(backend)
    metrics = train(backend, args, samples)
    lm = hf_model(model)
    head = torch.nn.Parameter(before["lm_head.weight"].clone())
    scores = torch.stack([(plain_hidden(lm, sample)[-1] @ head.T).squeeze() for sample in samples])
    loss = -F.logsigmoid(scores[::2] - scores[1::2] - 0.25).mean()
    loss.backward()
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    after = weights_of(backend)
    torch.testing.assert_close(
        before["lm_head.weight"] - after["lm_head.weight"], head.grad, rtol=1e-3, atol=1e-5
    )
    for name, parameter in lm.base_model.named_parameters():
        moved = before[f"model.{name}"] - after[f"model.{name}"]
        torch.testing.assert_close(moved, parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("loss_type", ["dpo_loss", "rm_loss"])
def test_pairs_stay_together_and_packing_changes_nothing(model, loss_type):
    outcomes = []
    for packing in PACKINGS.values():
        args = trainer_args(model, loss_type=loss_type, **SGD, global_batch_size=3, **packing)
        batch = samples_to_batch(args, random_pairs(num_pairs=6))
        data = split_for_ranks(args, batch, 1)[0]
        for step in data.steps:
            for micro_batch in step.micro_batches:
                ids = [data.batch["rollout_ids"][p] for p in micro_batch]
                assert all(ids.count(i) == 2 for i in ids)
        backend = backend_of(args)
        metrics = TrainingStep(backend, args, 0, data).run().summary
        outcomes.append((metrics, weights_of(backend)))
    for metrics, weights in outcomes[1:]:
        torch.testing.assert_close(weights, outcomes[0][1], rtol=1e-5, atol=1e-5)
        assert metrics["train/loss"] == pytest.approx(outcomes[0][0]["train/loss"], rel=1e-5)


def test_samples_that_are_no_pairs_are_one_error(model):
    args = trainer_args(model, loss_type="rm_loss")
    samples = random_pairs(2)
    samples[0].reward = samples[1].reward
    with pytest.raises(ValueError, match="are no pair"):
        train(backend_of(args), args, samples)


def test_a_reward_model_learns_and_its_folder_is_a_sequence_classification(model, tmp_path):
    from transformers import AutoModelForSequenceClassification

    args = trainer_args(model, loss_type="rm_loss", lr=1e-3, micro_batch_size=8)
    backend = backend_of(args)
    samples = random_pairs()
    runs = [train(backend, args, samples) for _ in range(8)]
    assert runs[-1]["train/accuracy"] == 1.0 and runs[-1]["train/loss"] < runs[0]["train/loss"] - 0.1
    backend.save_hf(tmp_path / "rm")
    judge = AutoModelForSequenceClassification.from_pretrained(tmp_path / "rm", dtype=torch.float32).eval()
    with torch.no_grad():
        scores = [judge(torch.tensor(s.tokens)[None]).logits.item() for s in samples]
    margin = sum(a - b for a, b in zip(scores[::2], scores[1::2], strict=True)) / len(samples) * 2
    critic = backend_of(ppo_args(model, critic_load=str(tmp_path / "rm"))).critic
    torch.testing.assert_close(weights_of(critic), weights_of(backend), rtol=0, atol=0)
    assert train(backend, args, samples)["train/margin"] == pytest.approx(margin, rel=1e-4)


# -- distillation --------------------------------------------------------------------------------------------


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


# -- kept policies -------------------------------------------------------------------------------------------


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

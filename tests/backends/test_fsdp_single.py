"""The FSDP trainer on one process: exact log-probs, invariance, losses, errors, checkpoints, HF folders."""

import json

import pytest
import torch
from tiny_model import make_tiny_model
from trainer_helpers import backend_of, random_samples, train, trainer_args, weights_of

from slime.backends.base import NonFiniteStepError
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep

pytestmark = pytest.mark.usefixtures("process_group")


def hf_log_probs(path, samples, temperature=1.0):
    """The obvious version: transformers' own attention, one sample at a time, full logits."""
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    result = []
    for sample in samples:
        ids = torch.tensor(sample.tokens)
        with torch.no_grad():
            dist_ = torch.log_softmax(lm(ids[None]).logits[0, :-1] / temperature, -1)
        result.append(dist_[torch.arange(len(ids) - 1), ids[1:]][-sample.response_length :])
    return result


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_equal_a_plain_forward_at_the_rollout_temperature(model, temperature):
    args = trainer_args(model, rollout_temperature=temperature)
    samples = random_samples(3, 4, longest=30)
    batch = samples_to_batch(args, samples)
    mbs = build_micro_batches(batch, [[3, 0, 7], [1, 2, 4, 5, 6], [], [11, 10, 9, 8]])
    result = backend_of(args).log_probs(mbs, entropy=True)
    torch.testing.assert_close(
        result.log_probs, hf_log_probs(model, samples, temperature), rtol=1e-4, atol=1e-5
    )
    assert all(
        h.min() > 0 and len(h) == s.response_length for h, s in zip(result.entropy, samples, strict=True)
    )


SPLITS = {
    "one sample each": dict(micro_batch_size=1),
    "five samples each": dict(micro_batch_size=5),
    "all in one stream": dict(use_dynamic_batch_size=True, max_tokens_per_gpu=100000),
    "by tokens, small chunks": dict(
        use_dynamic_batch_size=True, max_tokens_per_gpu=64, log_probs_chunk_size=3
    ),
}


@pytest.mark.parametrize("per_token", [False, True])
def test_weights_after_a_step_do_not_depend_on_packing_or_micro_batches(model, per_token):
    common = dict(
        optimizer="sgd",
        lr=0.5,
        weight_decay=0.0,
        clip_grad=0.0,
        calculate_per_token_loss=per_token,
        entropy_coef=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
        global_batch_size=8,
    )
    outcomes = []
    for split in SPLITS.values():
        args = trainer_args(model, **common, **split)
        backend = backend_of(args)
        metrics = train(backend, args, random_samples(4, 4))
        outcomes.append((metrics, weights_of(backend)))
    first_metrics, first_weights = outcomes[0]
    assert first_metrics["train/grad_norm"] > 0.01
    for metrics, weights in outcomes[1:]:
        torch.testing.assert_close(weights, first_weights, rtol=1e-5, atol=1e-5)
        for name in ("train/loss", "train/grad_norm", "train/kl_loss", "train/entropy_loss"):
            assert metrics[name] == pytest.approx(first_metrics[name], rel=1e-4, abs=1e-5)


def test_a_grpo_step_equals_the_obvious_computation_with_autograd(model):
    """Mean over rollouts of token means of -advantage x ratio, on transformers' own forward."""
    from transformers import AutoModelForCausalLM

    args = trainer_args(model, optimizer="sgd", lr=1.0, weight_decay=0.0, clip_grad=0.0, micro_batch_size=4)
    samples = random_samples(2, 4)
    backend = backend_of(args)
    before = weights_of(backend)
    train(backend, args, samples)
    after = weights_of(backend)

    lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    batch = samples_to_batch(args, samples)
    total = 0.0
    for sample, reward in zip(samples, batch["rewards"], strict=True):
        ids = torch.tensor(sample.tokens)
        log_dist = torch.log_softmax(lm(ids[None]).logits[0, :-1], -1)
        lp = log_dist[torch.arange(len(ids) - 1), ids[1:]][-sample.response_length :]
        mask = torch.tensor(sample.loss_mask).float()
        total = total - (torch.exp(lp - lp.detach()) * reward * mask).sum() / mask.sum()
    (total / len(samples)).backward()
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(before[name] - after[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_single_on_policy_step_has_ratio_one_and_later_steps_use_recorded_log_probs(model):
    args = trainer_args(model, micro_batch_size=4)
    metrics = train(backend_of(args), args, random_samples(2, 4))
    assert metrics["train/ppo_kl"] == 0.0
    assert metrics["train/ois"] == 1.0
    assert "rollout/log_probs" not in metrics
    args = trainer_args(model, micro_batch_size=4, global_batch_size=4)
    batch = samples_to_batch(args, random_samples(2, 4))
    data = split_for_ranks(args, batch, 1)[0]
    report = TrainingStep(backend_of(args), args, 0, data).run()
    metrics = report.summary
    assert len(report.steps) == 2
    assert report.steps[0]["train/ppo_kl"] == pytest.approx(0.0, abs=1e-6)
    assert report.steps[1]["train/ppo_kl"] != 0.0
    assert "rollout/log_probs" in metrics


def test_engine_log_probs_are_compared_and_may_stand_in_for_the_old_policy(model):
    samples = random_samples(2, 4)
    for sample, log_probs in zip(samples, hf_log_probs(model, samples), strict=True):
        sample.rollout_log_probs = log_probs.tolist()
    args = trainer_args(model)
    assert train(backend_of(args), args, samples)["train/train_rollout_logprob_abs_diff"] < 1e-5
    args = trainer_args(model, use_rollout_logprobs=True)
    metrics = train(backend_of(args), args, random_samples(2, 4))
    assert abs(metrics["train/ois"] - 1) > 0.01
    for sample in samples:
        sample.rollout_log_probs = None
    with pytest.raises(ValueError, match="--use-rollout-logprobs"):
        train(backend_of(args), args, samples)


@pytest.mark.parametrize(
    "estimator", ["gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
)
def test_every_estimator_takes_a_finite_step(model, estimator):
    args = trainer_args(
        model,
        advantage_estimator=estimator,
        normalize_advantages=True,
        micro_batch_size=8,
        global_batch_size=8,
    )
    metrics = train(backend_of(args), args, random_samples(4, 4))
    assert metrics["train/grad_norm"] > 0


def test_sft_lowers_its_loss(model):
    args = trainer_args(
        model,
        loss_type="sft_loss",
        calculate_per_token_loss=True,
        compute_advantages_and_returns=False,
        lr=3e-3,
    )
    backend = backend_of(args)
    samples = random_samples(2, 4)
    losses = [train(backend, args, samples)["train/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.1


def test_the_learning_rate_warms_up_and_decays(model):
    args = trainer_args(
        model, lr_warmup_iters=2, lr_decay_style="linear", lr_decay_iters=4, lr=1.0, min_lr=0.5
    )
    from slime.backends.shared.learning_rate import learning_rate

    assert [learning_rate(args, step, 4) for step in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.5]
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        learning_rate(args, 3, None)


def test_a_step_with_a_broken_number_is_not_applied(model, tmp_path):
    args = trainer_args(model, run_dir=str(tmp_path))
    backend = backend_of(args)
    batch = samples_to_batch(args, random_samples(2, 4))
    batch["rewards"][3] = float("inf")
    before = weights_of(backend)
    with pytest.raises(NonFiniteStepError, match="was not applied"):
        TrainingStep(backend, args, 0, split_for_ranks(args, batch, 1)[0]).run()
    torch.testing.assert_close(weights_of(backend), before, rtol=0, atol=0)
    assert train(backend, args, random_samples(2, 4))["train/grad_norm"] > 0


def test_a_custom_loss_gets_raw_logits_and_the_micro_batch(model, tmp_path):
    file = tmp_path / "loss.py"
    file.write_text(
        "def loss(args, batch, logits, reduce):\n"
        "    import torch\n"
        "    assert logits.shape[:2] == batch['tokens'].shape and len(batch['unconcat_tokens']) == "
        "len(batch['loss_masks'])\n"
        "    dist = torch.log_softmax(logits[0] / args.rollout_temperature, -1)\n"
        "    rows, start = [], 0\n"
        "    for tokens, length in zip(batch['unconcat_tokens'], batch['response_lengths']):\n"
        "        end = start + len(tokens)\n"
        "        rows.append(dist[torch.arange(end - length - 1, end - 1), tokens[-length:]])\n"
        "        start = end\n"
        "    value = -reduce(torch.cat(rows))\n"
        "    return value, {'mine': value.detach()}\n"
    )
    common = dict(micro_batch_size=3, compute_advantages_and_returns=False, optimizer="sgd", lr=0.1)
    common["rollout_temperature"] = 0.5
    samples = random_samples(2, 4)
    args = trainer_args(model, loss_type="custom_loss", custom_loss_function_path=f"{file}:loss", **common)
    custom = train(backend_of(args), args, samples)
    args = trainer_args(model, loss_type="sft_loss", **common)
    plain = train(backend_of(args), args, samples)
    assert custom["train/mine"] == pytest.approx(plain["train/loss"], rel=1e-5)
    assert custom["train/grad_norm"] == pytest.approx(plain["train/grad_norm"], rel=1e-4)


def test_hooks_see_and_change_the_train_data(model, tmp_path):
    file = tmp_path / "hooks.py"
    file.write_text(
        "import torch\n"
        "def advantages(args, data):\n"
        "    data['advantages'] = data['returns'] = [torch.full_like(k, 0.25) for k in data['kl']]\n"
        "def post(args, rollout_id, data):\n"
        "    assert rollout_id == 7\n"
        "    data['advantages'] = [2 * a for a in data['advantages']]\n"
    )
    args = trainer_args(
        model,
        custom_advantage_function_path=f"{file}:advantages",
        rollout_data_postprocess_path=f"{file}:post",
    )
    assert train(backend_of(args), args, random_samples(2, 4), rollout_id=7)[
        "rollout/advantages"
    ] == pytest.approx(0.5)


def test_a_custom_reducer_replaces_the_mean_of_the_policy_term_only(model, tmp_path):
    file = tmp_path / "reducer.py"
    file.write_text(
        "import torch\n"
        "def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):\n"
        "    assert [len(m) for m in loss_masks] == response_lengths and len(total_lengths) == "
        "len(loss_masks)\n"
        "    return lambda values: (values * torch.cat(loss_masks)).sum() / 10\n"
    )
    args = trainer_args(model, custom_pg_loss_reducer_function_path=f"{file}:constant", micro_batch_size=3)
    samples = random_samples(2, 4)
    custom = train(backend_of(args), args, samples)
    rewards = samples_to_batch(args, samples)["rewards"]
    expected = -sum(r * sum(s.loss_mask) for r, s in zip(rewards, samples, strict=True)) / 10 / len(samples)
    assert custom["train/pg_loss"] == pytest.approx(expected, rel=1e-4)
    plain = trainer_args(model, micro_batch_size=3)
    assert custom["train/entropy_loss"] == pytest.approx(
        train(backend_of(plain), plain, samples)["train/entropy_loss"]
    )


def test_resume_is_bit_identical(model, tmp_path):
    args = trainer_args(model, lr_warmup_iters=5)
    first = backend_of(args)
    train(first, args, random_samples(2, 4, seed=1))
    first.save(tmp_path / "ckpt")
    expected = train(first, args, random_samples(2, 4, seed=2))
    second = backend_of(args)
    second.load(tmp_path / "ckpt")
    got = train(second, args, random_samples(2, 4, seed=2))
    for name in ("train/loss", "train/grad_norm", "train/lr-pg_0", "train/entropy_loss"):
        assert got[name] == expected[name]
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=0)


def test_a_checkpoint_without_optimizer_loads_weights_only(model, tmp_path):
    args = trainer_args(model, no_save_optim=True)
    first = backend_of(args)
    train(first, args, random_samples(2, 4))
    first.save(tmp_path / "ckpt")
    second = backend_of(args)
    with pytest.raises(ValueError, match=r"without optimizer state.*--finetune"):
        second.load(tmp_path / "ckpt")
    second = backend_of(trainer_args(model, finetune=True))
    second.load(tmp_path / "ckpt")
    assert second.step == 0
    torch.testing.assert_close(weights_of(second), weights_of(first), rtol=0, atol=0)


def test_a_checkpoint_of_another_model_is_one_error_that_names_the_difference(model, tmp_path):
    args = trainer_args(model)
    backend_of(args).save(tmp_path / "ckpt")
    other = make_tiny_model(tmp_path / "other", hidden=32)
    backend = backend_of(trainer_args(other))
    with pytest.raises(
        ValueError,
        match=r"another model.*embed_tokens.weight is \[128, 64\] in it and \[128, 32\] here|lm_head",
    ):
        backend.load(tmp_path / "ckpt")
    with pytest.raises(ValueError, match="not a trainer checkpoint"):
        backend.load(tmp_path / "nothing")
    manifest = tmp_path / "ckpt" / "trainer.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 99}))
    with pytest.raises(ValueError, match="format 99"):
        backend.load(tmp_path / "ckpt")


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("bucket", [512 * 1024**2, 20_000])
def test_an_hf_folder_round_trips(tmp_path, tied, bucket):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=tied)
    args = trainer_args(path, update_weight_buffer_size=bucket)
    backend = backend_of(args)
    train(backend, args, random_samples(2, 4))
    (tmp_path / "out").mkdir()  # an older folder is replaced whole
    (tmp_path / "out" / "stale").write_text("x")
    backend.save_hf(tmp_path / "out")
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    torch.testing.assert_close(
        dict(lm.named_parameters()), weights_of(backend), rtol=0, atol=0, check_stride=False
    )
    AutoTokenizer.from_pretrained(tmp_path / "out")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "tiny"]
    assert not (tmp_path / "out" / "stale").exists()
    reloaded = backend_of(trainer_args(tmp_path / "out"))
    torch.testing.assert_close(weights_of(reloaded), weights_of(backend), rtol=0, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_export_gives_hub_names_once_in_buckets_below_the_limit(tmp_path, tied):
    from safetensors.torch import load_file

    path = make_tiny_model(tmp_path / "tiny", tie_word_embeddings=tied)
    backend = backend_of(trainer_args(path, update_weight_buffer_size=40_000))
    exported = {}
    for bucket in backend.export():
        assert len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= 40_000
        for name, tensor in bucket:
            assert name not in exported
            exported[name] = tensor.clone()
    hub = load_file(path / "model.safetensors")
    assert exported.keys() == hub.keys()
    torch.testing.assert_close(exported, hub, rtol=0, atol=0)
    halves = [tensor.dtype for bucket in backend.export(torch.bfloat16) for _, tensor in bucket]
    assert set(halves) == {torch.bfloat16}


def test_a_mixture_of_experts_exports_its_hub_tensors(tmp_path):
    from safetensors.torch import load_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "moe")
    hub = load_file(tmp_path / "moe" / "model.safetensors")
    backend = backend_of(trainer_args(tmp_path / "moe"))
    exported = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
    assert exported.keys() == hub.keys()
    torch.testing.assert_close(exported, hub, rtol=0, atol=0)


def test_reference_weights_stay_while_the_actor_trains(model):
    args = trainer_args(model, use_kl_loss=True, kl_loss_coef=0.1, kl_loss_type="k3", lr=1e-2)
    backend = backend_of(args)
    first = train(backend, args, random_samples(2, 4))
    second = train(backend, args, random_samples(2, 4))
    assert first["train/kl_loss"] == pytest.approx(0, abs=1e-7)
    assert second["train/kl_loss"] > 1e-4
    assert first["rollout/ref_log_probs"] == pytest.approx(second["rollout/ref_log_probs"], abs=1e-9)
    with pytest.raises(ValueError, match="no weights are kept under 'teacher'"):
        backend.log_probs([], weights="teacher")


def test_bfloat16_computes_with_fp32_master_weights(model):
    args = trainer_args(model, dtype="bfloat16", lr=1e-3)
    backend = backend_of(args)
    metrics = train(backend, args, random_samples(2, 4))
    assert {p.dtype for p in backend.model.parameters()} == {torch.float32}
    exact = train(backend_of(trainer_args(model)), trainer_args(model), random_samples(2, 4))
    assert metrics["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.05)

"""Shared by the trainer tests: settings without a command
line, random ragged batches, a single-process group.
"""

import atexit
import os
import secrets
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.catalog.estimators import ESTIMATORS
from slime.step.training_step import TrainingStep
from slime.utils.types import Sample


def trainer_args(model: str, **changes) -> SimpleNamespace:
    """Every flag that the batch and trainer code reads, at its default, with a plain SGD-free small setup."""
    values = dict(
        hf_checkpoint=str(model),
        ref_load=None,
        dtype="float32",
        loss_type="policy_loss",
        advantage_estimator="grpo",
        rewards_normalization=True,
        grpo_std_normalization=True,
        normalize_advantages=False,
        compute_advantages_and_returns=True,
        custom_loss_function_path=None,
        custom_advantage_function_path=None,
        custom_reward_post_process_path=None,
        custom_convert_samples_to_train_data_path=None,
        custom_pg_loss_reducer_function_path=None,
        custom_policy_loss_function_path=None,
        custom_tis_function_path=None,
        policy_loss_type=ESTIMATORS[changes.get("advantage_estimator", "grpo")].policy_loss,
        loss_reduction="token_mean" if changes.get("calculate_per_token_loss") else "rollout_mean",
        loss_denominator=None,
        gamma=1.0,
        lambd=1.0,
        sapo_tau_pos=1.0,
        sapo_tau_neg=1.05,
        clip_cov_ratio=2e-4,
        clip_cov_low=1.0,
        clip_cov_high=5.0,
        kl_cov_ratio=2e-3,
        kl_cov_coef=1.0,
        dppo_delta=0.15,
        use_tis=False,
        tis_clip=2.0,
        tis_clip_low=0.0,
        tis_level="token",
        tis_mode="clip",
        tis_batch_normalize=False,
        use_rs=False,
        rs_level="token",
        rs_upper=2.0,
        rs_lower=0.5,
        rs_veto=None,
        use_opsm=False,
        opsm_delta=1e-4,
        get_mismatch_metrics=False,
        skip_on_policy_check=False,
        logprob_diff_threshold=None,
        allow_sampling_mismatch=False,
        embedded_dtype="auto",
        fp8_rounding="auto",
        no_load_verify=False,
        nonfinite_action="stop",
        overlong_buffer_len=None,
        overlong_penalty_factor=1.0,
        reward_weights=None,
        rollout_max_response_len=16,
        run_dir="runs/test",
        seed=1234,
        rollout_data_postprocess_path=None,
        ref_update_interval=None,
        keep_old_actor=False,
        reset_optimizer_states=False,
        critic_load=None,
        critic_lr=None,
        critic_min_lr=0.0,
        critic_lr_decay_style="constant",
        critic_lr_warmup_iters=0,
        critic_clip_grad=1.0,
        value_clip=0.2,
        num_critic_only_steps=0,
        use_opd=False,
        opd_type=None,
        opd_kl="sampled",
        opd_kl_coef=1.0,
        opd_teacher_load=None,
        dpo_beta=0.1,
        dpo_label_smoothing=0.0,
        no_save_optim=False,
        no_load_optim=False,
        no_load_rng=False,
        async_save=False,
        finetune=False,
        reward_key=None,
        eps_clip=0.2,
        eps_clip_high=None,
        eps_clip_c=None,
        entropy_coef=0.0,
        kl_coef=0.0,
        use_kl_loss=False,
        kl_loss_coef=0.0,
        kl_loss_type="k1",
        use_unbiased_kl=False,
        use_rollout_logprobs=False,
        use_rollout_entropy=False,
        calculate_per_token_loss=False,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        log_probs_chunk_size=-1,
        logits_memory_gib=0.0,
        weight_copies="host",
        global_batch_size=None,
        micro_batch_size=1,
        use_dynamic_batch_size=False,
        max_tokens_per_gpu=None,
        balance_data=False,
        balance_by_flops=False,
        optimizer="adam",
        lr=1e-3,
        min_lr=0.0,
        lr_decay_style="constant",
        lr_warmup_iters=0,
        lr_decay_iters=None,
        weight_decay=0.01,
        adam_beta1=0.9,
        adam_beta2=0.99,
        adam_eps=1e-8,
        clip_grad=1.0,
        update_weight_buffer_size=512 * 1024**2,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        activation_checkpointing="none",
        fsdp_cpu_offload=False,
        compile=None,
        only_train_params_name_list=None,
        freeze_params_name_list=None,
        use_routing_replay=False,
        use_rollout_routing_replay=False,
        router_aux_loss_coef=None,
        lora_rank=0,
        lora_alpha=32.0,
        lora_target_modules=["all-linear"],
    )
    unknown = changes.keys() - values.keys()
    assert not unknown, f"no such flag: {unknown}"
    return SimpleNamespace(**(values | changes))


def random_samples(
    num_groups: int = 4, group_size: int = 4, *, vocab: int = 128, seed: int = 0, longest: int = 12
) -> list[Sample]:
    """Groups of ragged samples with random tokens, masks, log-probs and rewards."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, count: int = 1) -> list[int]:
        return torch.randint(low, high, (count,), generator=generator).tolist()

    samples = []
    for group in range(num_groups):
        prompt = draw(4, vocab, draw(1, longest)[0])
        for _ in range(group_size):
            response = draw(4, vocab, draw(1, longest)[0])
            mask = [1, *draw(0, 2, len(response))][: len(response)]
            samples.append(
                Sample(
                    group_index=group,
                    index=len(samples),
                    tokens=prompt + response,
                    response_length=len(response),
                    loss_mask=mask,
                    reward=float(draw(0, 3)[0]),
                    rollout_log_probs=(-torch.rand(len(response), generator=generator) * 3).tolist(),
                    status=Sample.Status.COMPLETED,
                )
            )
    return samples


def backend_of(args):
    return create_backend(args, rank=0, world_size=1, device="cpu")


def train(backend, args, samples, **options):
    batch = samples_to_batch(args, samples)
    return TrainingStep(backend, args, 0, split_for_ranks(args, batch, 1)[0], **options).run().summary


def engine_samples(backend, args, num_groups=2, group_size=4, noise=0.0, version=None):
    """Random samples whose engine log-probs are the trainer's own, plus noise."""
    samples = random_samples(num_groups, group_size)
    batch = samples_to_batch(args, samples)
    mbs = build_micro_batches(batch, [[i] for i in range(len(samples))])
    generator = torch.Generator().manual_seed(1)
    for sample, log_probs in zip(samples, backend.log_probs(mbs).log_probs, strict=True):
        shift = torch.randn(len(log_probs), generator=generator) * noise
        sample.rollout_log_probs = (log_probs + shift).tolist()
        if version is not None:
            sample.version_spans = [(f"run:{version}", 0, sample.response_length)]
    return samples


def with_nuclei(samples: list[Sample], *, vocab: int = 128, seed: int = 0) -> list[Sample]:
    """The same samples, two of three drawn from recorded
    parts of the vocabulary, and some tokens from all of it.
    """
    generator = torch.Generator().manual_seed(seed)
    for sample in samples:
        if sample.index % 3 == 2:
            continue
        kept = []
        for token in sample.tokens[len(sample.tokens) - sample.response_length :]:
            size = int(torch.randint(0, vocab // 2, (1,), generator=generator))
            kept.append(
                sorted({token, *torch.randperm(vocab, generator=generator)[:size].tolist()}) if size else []
            )
        sample.rollout_top_p_token_ids = [i for ids in kept for i in ids]
        sample.rollout_top_p_token_offsets = torch.tensor([0, *(len(ids) for ids in kept)]).cumsum(0).tolist()
    return samples


def init_process_group(rank: int = 0, world_size: int = 1, address: str | None = None) -> None:
    """A gloo group on this machine; a second call in the same process keeps the first group."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=address or meeting_point(), rank=rank, world_size=world_size)


def meeting_point() -> str:
    """Where the ranks of one group find each other: a new
    file. A port that is free now may be taken a moment later.
    """
    path = Path(tempfile.gettempdir(), f"slime-ranks-{secrets.token_hex(8)}")
    atexit.register(path.unlink, missing_ok=True)
    return f"file://{path}"

"""Shared by the trainer tests: settings, random ragged batches, a single-process group.

Trainers are imported by the functions that make them: tests of batches need none.
"""

import atexit
import secrets
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from devices import DEVICE, join_ranks

from slime.arguments import Args, default_args
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.utils.types import Sample


def trainer_args(model: str | Path, **changes) -> Args:
    """The settings of a trainer at their defaults, but for a rate at which tiny models learn quickly."""
    values = dict(dtype="float32", lr=1e-3, adam_beta2=0.99, rollout_max_response_len=16, run_dir="runs/test")
    return default_args(hf_checkpoint=str(model), **(values | changes))


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


def backend_of(args, **options):
    from slime.backends.fsdp import create_backend

    return create_backend(args, rank=0, world_size=1, device=DEVICE, **options)


def weights_of(backend):
    from slime.backends.fsdp.model import gather_full

    return {name: gather_full(p.data).clone() for name, p in backend.model.lm.named_parameters()}


def train(backend, args, samples=None, *, rollout_id=0, **options):
    from slime.step.training_step import TrainingStep

    batch = samples_to_batch(args, samples or random_samples(2, 4))
    return (
        TrainingStep(backend, args, rollout_id, split_for_ranks(args, batch, 1)[0], **options).run().summary
    )


def engine_samples(backend, args, num_groups=2, group_size=4, noise=0.0, version=None):
    """Random samples whose engine log-probs are the trainer's own, plus noise."""
    from slime.backends.shared.microbatch import build_micro_batches

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
    """The same samples, two of three drawn from recorded parts of the vocabulary, some tokens from all."""
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
    """A group on this machine; a second call in the same process keeps the first group."""
    if not dist.is_initialized():
        join_ranks(rank, world_size, address or meeting_point())


def meeting_point() -> str:
    """Where the ranks of one group meet: a new file, since a port that is free now may be taken soon."""
    path = Path(tempfile.gettempdir(), f"slime-ranks-{secrets.token_hex(8)}")
    atexit.register(path.unlink, missing_ok=True)
    return f"file://{path}"

"""Shared by the Megatron tests: tiny models of each family, settings, jobs of several processes."""

import gc
import os
import traceback
import uuid
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import DEVICE, join_ranks
from trainer_helpers import random_samples, trainer_args, with_nuclei

from slime.arguments import Args

SHORT = dict(
    tp="tensor_model_parallel_size",
    pp="pipeline_model_parallel_size",
    vpp="virtual_pipeline_model_parallel_size",
    cp="context_parallel_size",
    ep="expert_model_parallel_size",
    sp="sequence_parallel",
    distopt="use_distributed_optimizer",
)


def megatron_args(model, **changes) -> Args:
    values = dict(use_distributed_optimizer=False, timeouts={"collective": 300}, seed=1)
    return trainer_args(model, **(values | {SHORT.get(name, name): value for name, value in changes.items()}))


def make_family(path, kind: str, *, seed: int = 0, **changes) -> str:
    """A tiny random model of an HF family as a hub checkpoint, of odd sizes where layouts allow."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = dict(
        vocab_size=127,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        # The samples of the tests contain it: its row of the embedding is looked up and not trained.
        pad_token_id=78,
    )
    extra = {
        "llama": {"head_dim": 8},
        "qwen2": {},
        "qwen3": {"head_dim": 16},
        "qwen3_moe": dict(
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            norm_topk_prob=True,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        ),
    }[kind]
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **(common | extra | changes))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norms start at one and biases at zero: a wrong pairing of either would go unseen.
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    return str(path)


GRPO = dict(
    lr=0.1,
    use_kl_loss=True,
    kl_loss_coef=0.1,
    kl_loss_type="k3",
    entropy_coef=0.01,
    global_batch_size=5,
    use_dynamic_batch_size=True,
    max_tokens_per_gpu=40,
)


def training_step(backend, args, samples, rollout_id: int = 0, **options):
    """The TrainingStep of this rank on its share of `samples`."""
    from slime.batch.convert import samples_to_batch
    from slime.batch.split import split_for_ranks
    from slime.step.training_step import TrainingStep

    layout, batch = backend.layout, samples_to_batch(args, samples)
    data = split_for_ranks(args, batch, layout.dp_size, cp_size=layout.cp_size)[layout.dp_rank]
    return TrainingStep(backend, args, rollout_id, data, **options)


def train(backend_of, args, rank: int, world_size: int) -> dict:
    """Three GRPO steps on ragged samples: losses, norms, and the exported weights before and after.

    The process groups of an earlier trainer of this process end here.
    """
    end_groups()
    backend = backend_of(args, rank=rank, world_size=world_size, device=DEVICE)
    before = exported(backend)
    samples = with_nuclei(random_samples(5, 3, vocab=127), vocab=127)
    report = training_step(backend, args, samples).run()
    return {
        "steps": [(step["train/loss"], step["train/grad_norm"]) for step in report.steps],
        "entropy": report.summary["train/entropy_loss"],
        "before": before,
        "after": exported(backend),
        "backend": backend,
    }


def exported(backend, **options) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for bucket in backend.export(**options) for name, tensor in bucket}


def end_groups() -> None:
    """End all process groups but the default one: a trainer makes about forty, with three threads each."""
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
    from torch.distributed import distributed_c10d

    gc.collect()
    for dispatcher in [part for part in gc.get_objects() if isinstance(part, MoETokenDispatcher)]:
        dispatcher.probs = None  # of the last pass: its graph keeps the whole trainer
    for group in [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    gc.collect()


def in_processes(world_size: int, function, folder: Path, *args) -> dict:
    """Run function(rank, world_size, *args) on ranks of one group; rank 0's dict, or the first error."""
    # Ranks meet in a file: a free port may be taken again before they have all started.
    meeting = folder / f"meeting_{uuid.uuid4().hex}"
    mp.spawn(_rank_main, (world_size, str(meeting), function, str(folder), args), nprocs=world_size)
    return torch.load(folder / f"result_{world_size}.pt", weights_only=False)


def _rank_main(rank: int, world_size: int, meeting: str, function, folder: str, args: tuple) -> None:
    torch.set_num_threads(1)
    join_ranks(rank, world_size, f"file://{meeting}")
    try:
        result = function(rank, world_size, *args)
    except BaseException:
        # Ranks that wait for this one would report a lost connection; the cause is written first.
        traceback.print_exc()
        os._exit(1)
    if rank == 0:
        torch.save(result, Path(folder) / f"result_{world_size}.pt")
    dist.barrier()
    dist.destroy_process_group()


def run_cases(rank: int, world_size: int, cases: dict[str, tuple[str, dict]]) -> dict:
    """cases: name -> (model folder, settings). The setting `fsdp=True` trains with the other backend."""
    from slime.backends import fsdp, megatron

    results = {}
    for name, (model, settings) in cases.items():
        settings = dict(settings)
        module = fsdp if settings.pop("fsdp", False) else megatron
        result = train(module.create_backend, megatron_args(model, **(GRPO | settings)), rank, world_size)
        result.pop("backend")
        results[name] = result
    return results


def save_and_resume(
    rank: int, world_size: int, model: str, folder: str, save_as: dict, load_as: dict | None
) -> dict:
    """Three steps, a checkpoint, three more; then the last three again from `folder` as `load_as`."""
    from slime.backends.megatron import create_backend

    place = dict(rank=rank, world_size=world_size, device=DEVICE)

    def go_on(backend, args):
        steps = training_step(backend, args, random_samples(5, 3, vocab=127, seed=1), 1).run().steps
        return {
            "steps": [(s["train/loss"], s["train/grad_norm"]) for s in steps],
            "weights": exported(backend),
        }

    results = {}
    adam = dict(GRPO, optimizer="adam", lr=1e-3, adam_eps=1e-5)
    if save_as is not None:
        args = megatron_args(model, **adam, **save_as)
        first = train(create_backend, args, rank, world_size)["backend"]
        first.save(folder)
        results["went on"] = go_on(first, args)
        assert first.finish_save(wait=True)
    if load_as is not None:
        args = megatron_args(model, **adam, **load_as)
        second = create_backend(args, **place)
        second.load(folder)
        results["resumed"] = go_on(second, args)
    return results

"""Loads code, compiles layers and page-locks memory while engines on the same device still start.

A trainer with one layer, random weights and a small vocabulary takes one step on made-up data. The compiled
code serves every layer of that shape in this process, and stays in torch's cache folders for later runs.
"""

import contextlib
import gc
import logging
import tempfile
import threading
import time
from collections.abc import Iterator

import torch

from slime.arguments import Args, default_args
from slime.backends import create_backend
from slime.backends.shared.host_memory import BLOCK_BYTES, lock_ahead
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.catalog.backends import BACKENDS
from slime.step.training_step import TrainingStep
from slime.utils.async_utils import in_background
from slime.utils.machine import accelerator
from slime.utils.misc import load_function
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

_WORDS = 512
_LONG, _SHORT = 8192, 1024  # tokens of two micro-batches
_PROMPT, _ANSWER = 128, 384  # tokens of a sample in them: prompts that are worth sharing
# Flags that decide what a layer computes.
_KEPT = (
    *("train_backend", "dtype", "activation_checkpointing", "fp8_training", "compile", "share_prefix"),
    *("lora_rank", "lora_alpha", "lora_target_modules", "seed"),
)

# Of a number, of its two moments, of the number as it is pushed.
_MASTER_BYTES, _MOMENT_BYTES, _PUSHED_BYTES = 4, 8, 2
_HALF_BYTES = 2  # of weights that stand beside their masters
_TURN_S = 0.25  # half of what a block takes: locking then takes about as long as compiling
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def warm_up(args: Args, device: torch.device) -> None:
    """Warm up a rank that is alone on a GPU; errors are only logged, since the real start would raise them.

    Memory is locked on a thread, since compiling seldom needs the device. Both have finished on return, or a
    model that is loaded meanwhile would lock more memory before this memory is free for it.
    """
    if device.type != "cuda":
        return
    trainer = BACKENDS[args.train_backend]
    with _timed("code loaded"):
        load_function(trainer.create)
    blocks: list[tuple[int, int]] = []
    with _timed("host memory counted"):  # not on the thread: transformers changes defaults of all threads
        blocks += _blocks_to_lock(args)
    compiled = threading.Event()
    locking = in_background(lambda: _lock(blocks, compiled), "host-memory")
    try:
        # A trainer with layers of its own would leave its groups of ranks behind.
        if trainer.trains_transformers_model and args.compile is not False:
            with _timed("layers compiled"):
                _compile_layers(args, device)
            gc.collect()
            accelerator.empty_cache()
    finally:
        compiled.set()
    locking.result()


@contextlib.contextmanager
def _timed(what: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        logger.info("Not %s in advance (the first step does it): %s: %s", what, type(error).__name__, error)
    else:
        logger.info("%s before the model is loaded (%.1f s)", what, time.monotonic() - started)


def _compile_layers(args: Args, device: torch.device) -> None:
    steps = logging.getLogger("slime.step")
    level = steps.level
    steps.setLevel(logging.ERROR)  # hints about a made-up step are nobody's
    try:
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(devices=[device]):
            _train_one_layer(args, folder, device)
    finally:
        steps.setLevel(level)


def _train_one_layer(args: Args, folder: str, device: torch.device) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(args.hf_checkpoint)
    text = config.get_text_config()
    if any(getattr(text, name, None) for name in _EXPERTS):
        return  # one layer of them is too large beside an engine
    text.num_hidden_layers, text.vocab_size = 1, _WORDS
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:1]
    config.save_pretrained(folder)
    own = default_args(
        hf_checkpoint=folder,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=_LONG,
        **{name: getattr(args, name) for name in _KEPT},
    )
    backend = create_backend(own, rank=0, world_size=1, device=device, random_weights=True)
    # A layer is compiled for shared prompts and for others, a narrow one for long and short micro-batches.
    for tokens, siblings in ((_LONG, 8), (_LONG, 1), (_SHORT, 1)):
        share = split_for_ranks(own, samples_to_batch(own, _samples(tokens, siblings)), 1)[0]
        TrainingStep(backend, own, 0, share).run()


def _blocks_to_lock(args: Args) -> list[tuple[int, int]]:
    """Return (bytes, block size) of the memory for offloaded state and for the copy of a weight push."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(args.hf_checkpoint)
    with torch.device("meta"):
        numbers = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    moments = 0 if args.lora_rank else _MOMENT_BYTES * numbers
    leaving = 0
    if args.offload_train:
        leaving = _MASTER_BYTES * numbers + moments
        if BACKENDS[args.train_backend].weights_in_dtype and args.dtype != "float32":
            leaving += _HALF_BYTES * numbers
    elif args.optimizer_cpu_offload:
        leaving = int(moments * args.optimizer_offload_fraction)
    needed = [(leaving, BLOCK_BYTES), (_PUSHED_BYTES * numbers, args.update_weight_buffer_size)]
    return [(nbytes, block_bytes) for nbytes, block_bytes in needed if nbytes]


def _lock(blocks: list[tuple[int, int]], compiled: threading.Event) -> None:
    """Lock the memory; until layers are compiled, pause after each block to leave them the device."""
    if not blocks:
        return
    with _timed("host memory page-locked"):
        for nbytes, block_bytes in blocks:
            lock_ahead(nbytes, block_bytes, lambda: compiled.wait(_TURN_S))


def _samples(tokens: int, siblings: int) -> list[Sample]:
    """Answers of about that many tokens together, so many to a prompt, eight to a group."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for index in range(tokens // (_PROMPT + _ANSWER)):
        prompt = [2 + (index // siblings + place) % _PROMPT for place in range(_PROMPT)]
        answer = torch.randint(2, _WORDS, (_ANSWER,), generator=generator).tolist()
        sample = Sample(group_index=index // 8, index=index, tokens=prompt + answer, response_length=_ANSWER)
        sample.reward, sample.status = float(index % 2), Sample.Status.COMPLETED
        samples.append(sample)
    return samples

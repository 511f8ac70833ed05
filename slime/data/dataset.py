"""The dataset: samples in file order, and for each epoch an order that depends on nothing but (seed, epoch).

The order is computed, not drawn from a shared generator, so a resumed run and every process agree on it.
"""

import functools
import hashlib
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Any

from slime.data.media import bare_messages
from slime.data.mix import mix64
from slime.data.prompt_rows import PromptFormat, read_fields, row_to_sample
from slime.data.prompt_sources import read_file, read_rows
from slime.utils.media.image_tokens import encoder_of
from slime.utils.types import Sample

logger = logging.getLogger(__name__)

__all__ = ["Dataset", "check_prompt_file", "epoch_order", "filter_long_prompt", "read_file"]


def epoch_order(seed: int, epoch: int, size: int) -> list[int]:
    """Return the order in which epoch `epoch` visits `size` samples: by a mix of (seed, epoch, index)."""
    return sorted(range(size), key=lambda index: (mix64(seed, epoch, index), index))


def filter_long_prompt(
    samples: Sequence[Sample],
    tokenizer: Any,
    processor: Any = None,
    max_length: int | None = None,
    *,
    batch_size: int = 1024,
) -> list[Sample]:
    """Return samples with at most `max_length` prompt tokens, in order. Message lists are rendered first."""
    if max_length is None:
        return list(samples)
    kept: list[Sample] = []
    for start in range(0, len(samples), batch_size):
        batch = samples[start : start + batch_size]
        lengths = prompt_lengths(batch, tokenizer, processor)
        kept += [s for s, length in zip(batch, lengths, strict=True) if length <= max_length]
    return kept


def prompt_lengths(samples: Sequence[Sample], tokenizer: Any, processor: Any = None) -> list[int]:
    """Return token counts of prompts; a picture counts as the tokens that the processor makes of its size."""
    texts = [_prompt_text(sample, tokenizer) for sample in samples]
    lengths = [len(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]] if texts else []
    for i, sample in enumerate(samples):
        if processor and sample.multimodal_inputs:
            encoder = encoder_of(processor)
            # The text already has one image token for each.
            lengths[i] += sum(encoder.count(picture) - 1 for picture in sample.multimodal_inputs["images"])
    return lengths


def _prompt_text(sample: Sample, tokenizer: Any) -> str:
    """Return the prompt as text; empty if only a function of the user can read it."""
    if isinstance(sample.prompt, str):
        return sample.prompt
    if not isinstance(sample.prompt, list):
        return ""
    text: str = tokenizer.apply_chat_template(
        bare_messages(sample.prompt),
        tools=sample.metadata.get("tools"),
        tokenize=False,
        add_generation_prompt=True,
        **sample.apply_chat_template_kwargs,
    )
    return text


class Dataset:
    """All prompts of one or several files. `samples[i]` follows the current epoch's order.

    Example: `Dataset("train.jsonl@[0:100]", tokenizer, None, 512, prompt_key="question", label_key="a")`.
    """

    def __init__(
        self,
        path: str | Iterable[str],
        tokenizer: Any = None,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "input",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str | None = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
        fmt: PromptFormat | None = None,
        flag: str = "--prompt-data",
        length_flag: str = "--rollout-max-prompt-len",
    ):
        """`fmt`: a complete prompt format, used in place of the keys; it also names the readers of prompts
        and labels.
        """
        fmt = fmt or PromptFormat(
            input_key=prompt_key,
            label_key=label_key,
            metadata_key=metadata_key,
            tool_key=tool_key,
            multimodal_keys=multimodal_keys,
            apply_chat_template=apply_chat_template,
            apply_chat_template_kwargs=apply_chat_template_kwargs or {},
        )
        read = [row_to_sample(row, fmt, tokenizer, processor, where=place) for place, row in read_rows(path)]
        name = path if isinstance(path, str) else ",".join(path)
        if not read:
            raise ValueError(f"{flag} {name}: no rows; the file (or its slice) is empty.")
        kept = filter_long_prompt(read, tokenizer, processor, max_length)
        if not kept:
            raise ValueError(
                f"{flag} {name}: all {len(read)} prompts are longer than {length_flag} {max_length} "
                f"tokens, 0 are left; raise {length_flag} or use shorter prompts."
            )
        if len(kept) < len(read):
            logger.info("%s: %d of %d prompts have at most %s tokens", name, len(kept), len(read), max_length)
        self.origin_samples = kept
        self.seed = seed
        self.unshuffle()

    def unshuffle(self) -> None:
        """Put the samples in the order of the files."""
        self.epoch_id = -1  # -1: file order, no epoch has been shuffled
        self.order: list[int] = list(range(len(self.origin_samples)))

    def shuffle(self, epoch_id: int) -> None:
        """Put the samples in the order of epoch `epoch_id`."""
        if epoch_id != self.epoch_id:
            self.order = epoch_order(self.seed, epoch_id, len(self.origin_samples))
            self.epoch_id = epoch_id

    @property
    def samples(self) -> list[Sample]:
        return [self.origin_samples[i] for i in self.order]

    @functools.cached_property
    def digest(self) -> str:
        """Return a digest of all prompts and labels, which shows a resumed run that they are unchanged."""
        found = hashlib.blake2b(digest_size=8)
        for sample in self.origin_samples:
            found.update(repr((sample.prompt, sample.label)).encode(errors="surrogatepass"))
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self.origin_samples)

    def __getitem__(self, index: int) -> Sample:
        return self.origin_samples[self.order[index]]


def check_prompt_file(path: str | Iterable[str], fmt: PromptFormat, *, max_rows: int) -> None:
    """Check that the first rows can become samples, at little more than the cost of reading them."""
    for place, row in itertools.islice(read_rows(path), max_rows):
        read_fields(row, fmt, place)

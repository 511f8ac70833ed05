"""Returns a response's text for rewards: `Sample.response` without the tokenizer's special tokens.

By default responses include the token that ended them ("42<|im_end|>"), like the engine's text. Built-in
rewards read `response_text`; a custom reward gets the unchanged `sample.response` and may call it, too.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # graders that are called directly import this module
    from slime.arguments import PluginArgs
    from slime.utils.types import Sample

# What reasoning models write between; rewards look for them even where a tokenizer calls them special.
_KEPT = frozenset({"<think>", "</think>"})
_TAIL_CHARS = 100  # no token of any family is longer
_MIN_LENGTH = 3  # a pad token of "!" is also the punctuation of responses
# Tokens that end a turn or a text and do not have the usual shape <|...|>.
_ODD_ENDS = """
    </s> <s> <eos> <bos> <pad> <unk> <end_of_turn> <start_of_turn> <turn|> <|turn> <seed:eos> <endoftext>
    <end_of_text> <end_of_utterance> <eot> <eod> <EOT> <EOD> [/INST] [EOS] [EOT] [PAD] [SEP] [UNK]
    [|endofturn|] [e~[ ]~b]
""".split()  # noqa: SIM905 - a list of words reads better as words
# White space and special tokens of any family, read from the end of a text backwards.
_TAIL = re.compile(
    r"(?:\s|>\|[^<>|\s]{1,64}\|<|>｜[^<>｜\s]{1,64}｜<|"
    + "|".join(re.escape(token[::-1]) for token in _ODD_ENDS)
    + ")*+"
)


def response_text(args: PluginArgs, sample: Sample) -> str:
    """Return the response without the tokenizer's special tokens, and without any family's at its end."""
    # Arguments that a test or a script built may name no model.
    return without_special_tokens(sample.response, special_tokens_of(vars(args).get("hf_checkpoint")))


answer_text = response_text  # its former name, which rewards of users import


def without_special_tokens(text: str, tokens: frozenset[str] = frozenset()) -> str:
    """Remove `tokens` everywhere, and at the end any special tokens with the white space around them."""
    if tokens:
        text = _pattern_of(tokens).sub("", text)
    return text if ending_of(text) is None else text.removesuffix(_tail_of(text))


def ending_of(text: str) -> str | None:
    """Return the special token that the text ends in, as written there; None: it ends in ordinary text."""
    tail = _tail_of(text).split()
    return tail[-1] if tail else None


def share_with_ending(samples: Sequence[Sample]) -> float:
    """Return the share of these responses that end in a special token."""
    return sum(ending_of(sample.response[-_TAIL_CHARS:]) is not None for sample in samples) / len(samples)


@functools.lru_cache(maxsize=8)
def special_tokens_of(hf_checkpoint: str | None) -> frozenset[str]:
    """Return the tokens that skip_special_tokens removes when decoding; empty without a tokenizer."""
    if hf_checkpoint is None:
        return frozenset()
    from slime.utils.processing_utils import load_tokenizer  # slow to import, and most graders need none

    try:
        tokenizer = load_tokenizer(hf_checkpoint)
    except (OSError, ValueError):
        return frozenset()  # a run without a tokenizer has no such tokens in its text
    # Not every kind of tokenizer has the table.
    added = {
        token.content for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special
    }
    tokens = (added | set(tokenizer.all_special_tokens)) - _KEPT
    return frozenset(token for token in tokens if len(token) >= _MIN_LENGTH)


@functools.lru_cache(maxsize=8)
def _pattern_of(tokens: frozenset[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=lambda t: (-len(t), t))))


def _tail_of(text: str) -> str:
    tail = _TAIL.match(text[::-1])
    return tail.group()[::-1] if tail is not None else ""

"""Turns token ids into the text of a response, and finds stop strings."""

from collections.abc import Sequence as Ids
from typing import Any

from slime.wire.protocol import SamplingParams


class Detokenizer:
    """Wraps a tokenizer; if the model folder has none, text is empty and stop strings are refused."""

    def __init__(self, tokenizer: Any | None):
        self.tokenizer = tokenizer
        # Most characters (or bytes) in one token.
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1) if tokenizer is not None else 1

    @classmethod
    def load(cls, model_path: str) -> "Detokenizer":
        from transformers import AutoTokenizer  # late: takes seconds to import

        try:
            tokenizer = AutoTokenizer.from_pretrained(model_path)
        except (OSError, ValueError):
            return cls(None)
        # The truncation setting of the file is removed now, and not while another thread decodes.
        tokenizer("a")
        return cls(tokenizer)

    @property
    def eos_token_id(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eos_token_id

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        assert self.tokenizer is not None, "text is refused where there is no tokenizer"
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def decode(self, ids: Ids[int], sampling: SamplingParams) -> str:
        if self.tokenizer is None:
            return ""
        text: str = self.tokenizer.decode(
            ids,
            skip_special_tokens=sampling.skip_special_tokens,
            spaces_between_special_tokens=sampling.spaces_between_special_tokens,
        )
        return text

    def find_stop(self, output: Ids[int], sampling: SamplingParams) -> str | None:
        """Return the stop string that the newest token completed. Only the tail is decoded."""
        # A token decodes to a character or more, but a character may take
        # several byte tokens: hence the factor.
        tail = 4 * max(len(s) for s in sampling.stop) + 4
        text = self.decode(output[-tail:], sampling)
        hits = [(text.find(s), s) for s in sampling.stop if s in text]
        return min(hits)[1] if hits else None

    def answer_text(self, output: Ids[int], sampling: SamplingParams, finish: dict[str, Any] | None) -> str:
        """Return the text of a response, without the stop token or string unless no_stop_trim is set."""
        matched = None if finish is None or sampling.no_stop_trim else finish.get("matched")
        if isinstance(matched, int):
            return self.decode(output[:-1], sampling)
        text = self.decode(output, sampling)
        return text[: text.rfind(matched)] if isinstance(matched, str) and matched in text else text

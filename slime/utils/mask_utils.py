"""Loss masks for supervised conversations: 1 on the tokens the assistant wrote, 0 on everything else.

Message boundaries are found by rendering conversations and comparing them, not by known token ids, so a
template of the same family with other special tokens works too.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[dict[str, Any]] | None  # the tools that a template gets, as JSON schemas
IdsAndMask = tuple[list[int], list[int]]  # of equal length

_DISTILL_MARK = "<｜Assistant｜>"
_PROBE_USER = {"role": "user", "content": "?"}
# Templates render these roles, or refuse them with an error. Many skip other roles silently.
_COMMON_ROLES = ("system", "user", "assistant", "tool")


class MultiTurnLossMaskGenerator:
    """Computes token ids and loss mask of a conversation.

    `tokenizer_type` names how its chat template treats earlier turns.

    qwen: a turn is rendered the same at every position. qwen3: the template drops the thinking of earlier
    turns, so each turn is rendered as if it were the last. qwen3_5: the whole conversation as the template
    writes it, without earlier thinking. distill_qwen: one question, one response. text: no template;
    contents are concatenated, and the end-of-sequence token comes last.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type
        families: dict[str, Callable[[Messages, Tools], IdsAndMask]] = {
            "qwen": self.gen_multi_turn_loss_mask_qwen,
            "qwen3": self.gen_multi_turn_loss_mask_qwen3,
            "qwen3_5": self.gen_multi_turn_loss_mask_qwen3_5,
            "distill_qwen": self.gen_multi_turn_loss_mask_distill_qwen,
            "text": self.gen_text_loss_mask,
        }
        if tokenizer_type not in families:
            raise ValueError(f"--loss-mask-type is {tokenizer_type!r}; known are {', '.join(families)}.")
        if tokenizer_type == "qwen" and _DISTILL_MARK in tokenizer.get_vocab():
            self.tokenizer_type = "distill_qwen"
        self._generate = families[self.tokenizer_type]

    def get_loss_mask(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Return the token ids of a conversation, and its loss mask."""
        _check_messages(messages)
        templated = self.tokenizer_type != "text"
        if templated and any(message["role"] not in _COMMON_ROLES for message in messages):
            dropped = find_dropped_message(messages, self._render(messages, tools))
            if dropped is not None:
                role = messages[dropped]["role"]
                raise ValueError(f"the chat template drops message {dropped}: it does not know role {role!r}")
        return self._generate(messages, tools)

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        """Return for each mask the number of tokens from the first trained one to the end; 0: none is."""
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]

    def get_text_from_loss_mask(self, token_ids: list[int], loss_mask: list[int]) -> list[str]:
        """Return the text of each trained span, for inspection."""
        pairs = zip(token_ids, loss_mask, strict=True)
        stretches = itertools.groupby(pairs, key=lambda pair: bool(pair[1]))
        return [self.tokenizer.decode([token for token, _ in run]) for trained, run in stretches if trained]

    # -- families --------------------------------------------------------------------------------------------

    def gen_multi_turn_loss_mask_qwen(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Render once; prefixes of the conversation mark where each turn begins and ends."""
        ids = self._encode(self._render(messages, tools))
        mask = [0] * len(ids)
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            is_last = i + 1 == len(messages)
            through = ids if is_last else self._encode(self._render(messages[: i + 1], tools))
            before = (
                self._encode(self._render(messages[:i], tools, ask=True)) if i else self._opening(through)
            )
            if ids[: len(before)] != before or ids[: len(through)] != through:
                raise ValueError(
                    f"the chat template rewrites earlier turns (message {i} reads differently once others "
                    "follow): use --loss-mask-type qwen3 (each turn as the newest) or qwen3_5 (as the "
                    "template writes it)."
                )
            if _is_trained(message):
                mask[len(before) : len(through)] = [1] * (len(through) - len(before))
        return ids, mask

    def gen_multi_turn_loss_mask_qwen3(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Render turns one by one after a probe question, so that each keeps its thinking, then join them."""
        first = next((i for i, m in enumerate(messages) if m["role"] == "assistant"), len(messages))
        ids = self._encode(self._render(messages[:first], tools)) if first else []
        mask = [0] * len(ids)
        probe = self._render([_PROBE_USER], None)
        header = self._encode(_without_prefix(self._render([_PROBE_USER], None, ask=True), probe))
        for run in _runs(messages[first:]):
            turn = self._encode(_without_prefix(self._render([_PROBE_USER, *run], None), probe))
            trained = run[0]["role"] == "assistant" and _is_trained(run[0])
            ids += turn
            mask += [0] * len(header) + [1] * (len(turn) - len(header)) if trained else [0] * len(turn)
        return ids, mask

    def gen_multi_turn_loss_mask_qwen3_5(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Render once and find the turns in the text; needs a fast tokenizer, which knows token positions."""
        if not self.tokenizer.is_fast:
            raise ValueError(
                "--loss-mask-type qwen3_5 needs a fast tokenizer (token offsets); use qwen3 instead."
            )
        text = self._render(messages, tools)
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        turns = zip(self._find_turns(text, messages), _turns(messages), strict=True)
        spans = [span for span, message in turns if _is_trained(message)]
        mask = [int(any(a <= start < b for a, b in spans)) for start, _ in encoded["offset_mapping"]]
        return list(encoded["input_ids"]), mask

    def gen_multi_turn_loss_mask_distill_qwen(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Train the last message; all before it is the prompt."""
        prompt = self._encode(self._render(messages[:1], tools, ask=True))
        last = messages[-1]
        if last["role"] != "assistant":
            ids = self._encode(self._render(messages, tools))
            return ids, [0] * len(ids)
        answer = self._encode(_text_of(last["content"]))
        return prompt + answer, [0] * len(prompt) + [int(_is_trained(last))] * len(answer)

    def gen_text_loss_mask(self, messages: Messages, tools: Tools = None) -> IdsAndMask:
        """Join the contents without a template; the assistant's are trained, except for a first token."""
        special: list[int] = self.tokenizer("")["input_ids"]
        ids = [token for token in special if token == self.tokenizer.bos_token_id]
        mask = [0] * len(ids)
        for message in messages:
            tokens = self._encode(_text_of(message["content"]))
            ids += tokens
            trained = message["role"] == "assistant" and _is_trained(message)
            mask += [int(trained)] * len(tokens)
        if messages[-1]["role"] == "assistant" and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
            mask.append(int(_is_trained(messages[-1])))
        mask[:1] = [0]  # nothing predicts the first token
        return ids, mask

    # -- parts -----------------------------------------------------------------------------------------------

    def _opening(self, ids: list[int]) -> list[int]:
        """Return the ids in front of a response when the assistant speaks first, its header included."""
        ask = _without_prefix(self._render([_PROBE_USER], None, ask=True), self._render([_PROBE_USER], None))
        header = self._encode(ask)
        ends = (i + len(header) for i in range(len(ids)) if ids[i : i + len(header)] == header)
        return ids[: next(ends, 0)]

    def _find_turns(self, text: str, messages: Messages) -> list[tuple[int, int]]:
        """Return character spans of the assistant turns: after the header, through the end mark."""
        ask = _without_prefix(self._render([_PROBE_USER], None, ask=True), self._render([_PROBE_USER], None))
        header, opening = ask[: ask.index("\n") + 1], ask[ask.index("\n") + 1 :]
        mark = "QzProbeAnswerzQ"
        end = self._render([_PROBE_USER, {"role": "assistant", "content": mark}], None).split(mark)[-1]
        spans, position = [], text.find(header)
        while position >= 0:
            start = position + len(header)
            if opening and text.startswith(opening, start):
                start += len(opening)
            stop = text.find(end, start)
            stop = len(text) if stop < 0 else stop + len(end)
            spans.append((start, stop))
            position = text.find(header, stop)
        if len(spans) != len(_turns(messages)):
            raise ValueError(
                f"the rendered conversation has {len(spans)} assistant headers for {len(_turns(messages))} "
                "assistant messages: a message contains the header's text, or the template drops or joins "
                "turns."
            )
        return spans

    def _render(self, messages: Messages, tools: Tools, *, ask: bool = False) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=ask
        )
        return text

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _check_messages(messages: Any) -> None:
    is_list = isinstance(messages, list) and bool(messages)
    if not is_list or not all(isinstance(message, dict) and "role" in message for message in messages):
        raise ValueError(
            f"a supervised sample needs a list of messages with roles, found {type(messages).__name__}: "
            "set --input-key to the column that holds the conversation and leave --apply-chat-template off."
        )


def _runs(messages: Messages) -> list[Messages]:
    """Group messages as templates do: assistant turns alone, all between two of them together."""
    runs: list[Messages] = []
    for is_turn, together in itertools.groupby(messages, key=lambda message: message["role"] == "assistant"):
        found = list(together)
        runs += [[turn] for turn in found] if is_turn else [found]
    return runs


def _turns(messages: Messages) -> Messages:
    return [m for m in messages if m["role"] == "assistant"]


def _is_trained(message: dict[str, Any]) -> bool:
    return bool(message.get("step_loss_mask", 1) == 1)


def _text_of(content: Any) -> str:
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def _without_prefix(text: str, prefix: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(
            "the chat template does not render a conversation as a continuation of its beginning."
        )
    return text[len(prefix) :]


def find_dropped_message(messages: Sequence[dict[str, Any]], text: str) -> int | None:
    """Return the first message of an uncommon role that the rendered text lacks; None: it has all."""
    for number, message in enumerate(messages):
        content = message.get("content")
        if (
            message.get("role") not in _COMMON_ROLES
            and isinstance(content, str)
            and content.strip() not in text
        ):
            return number
    return None

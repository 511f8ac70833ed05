"""Messages -> token ids with the model's own chat template, so that no token which exists is made again.

The first prompt of a conversation is rendered whole. Every later one is the ids that exist plus the text that
the template writes *behind an answer*: the template is given a short stand-in conversation that ends with an
answer, followed by the new messages, and what comes after that answer is taken. So the cost of a turn does
not grow with the conversation, and what the policy sampled stays as it was sampled.

Some templates leave the thoughts of earlier answers out once the user speaks again. Where such thoughts
exist the ids that exist are no longer what the template means, and the conversation is rendered whole: the
tree forks (`history="template"`). With `history="extend"` the thoughts stay in the context.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.agent.shown_pictures import Placed, expanded, for_template, pictures_in
from slime.utils.media.pictures import NotAnImage

Message = dict[str, Any]
History = Literal["template", "extend"]

_ANSWER = "Q7zANSWERzQ7"  # stands for an answer in the stand-in conversation
_THOUGHT = "Q7zTHOUGHTzQ7"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "it", "parameters": {}}}
THINK_TAGS = ("<think>", "</think>")
_WORD = re.compile(r"[A-Za-z0-9]+")


class TemplateRefused(ValueError):
    """The model's chat template cannot write these messages."""


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """What a template does to earlier answers. `forks` names the turns at which history is rendered anew.

    Example, of a template that drops thoughts: `PrefixReport(extends=True, forks=("a user message after an
    answer with thoughts",), refuses=())`.
    """

    extends: bool  # new messages can be rendered behind an answer at all
    forks: tuple[str, ...]
    refuses: tuple[str, ...]  # kinds of messages that the template does not take

    @property
    def has_prefix_property(self) -> bool:
        return self.extends and not self.forks


class Renderer:
    """Prompts for one tokenizer and one set of template arguments (`enable_thinking`, say)."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        history: History = "template",
        processor: Any = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "the tokenizer has no chat template, so messages cannot become a prompt: add a "
                "chat_template.jinja to the model's folder"
            )
        self.tokenizer, self.history = tokenizer, history
        self.processor = processor  # of models that read pictures; None: text only
        self.template_kwargs = dict(template_kwargs or {})

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """The whole conversation, up to where the answer begins."""
        text = self.text(messages, tools)
        _check_taken(messages, text)
        _check_tools_taken(tools or (), text)
        return self.encode(text)

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, answer_follows: bool = True
    ) -> str:
        """What the template writes; TemplateRefused where it raises."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                for_template(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program of the model's author: it may raise anything
            raise TemplateRefused(
                f"the chat template of the model refuses these messages ({type(error).__name__}: {error})"
            ) from error
        return text

    def encode(self, text: str) -> list[int]:
        try:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        except (TypeError, UnicodeEncodeError):
            raise TemplateRefused(
                "the messages hold half of a surrogate pair (\\ud800 to \\udfff), which is no text: decode "
                "what a tool gives with errors='replace'"
            ) from None

    def with_pictures(
        self, ids: list[int], messages: Sequence[Message], *, start: int
    ) -> tuple[list[int], list[Placed]]:
        """What was rendered of `messages`, and stands behind `start` ids, as the model reads it."""
        pictures = pictures_in(messages)
        if not pictures and self.processor is None:
            return ids, []
        if self.processor is None:
            raise TemplateRefused("the model reads text only: it takes no images")
        try:
            return expanded(ids, pictures, self.processor, start=start)
        except NotAnImage:
            raise
        except ValueError as error:
            raise TemplateRefused(
                f"the chat template of the model does not write each image where it is shown ({error})"
            ) from error

    def extension(self, new_messages: Sequence[Message], *, stop_id: int | None) -> list[int] | None:
        """The ids that follow an answer; None: this template cannot say, so the conversation is rendered.

        `stop_id` is the token by which the answer ended, None if it was cut: then the template's own end of
        a turn is part of what follows.
        """
        text = self._behind_answer(new_messages)
        if text is None:
            return None
        ids = self.encode(text)
        ends_turn = bool(ids) and ids[0] == self._end_of_turn
        if stop_id is not None and ids and (ids[0] == stop_id or ends_turn):
            # The token that was sampled stands where the template would have written its own.
            return ids[1:]
        return ids

    def _behind_answer(self, new_messages: Sequence[Message]) -> str | None:
        stand_in: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = self.text([*stand_in, *new_messages])
        except TemplateRefused:
            if not _answers_calls(new_messages):
                raise
            # Some templates take results only behind the calls they answer.
            stand_in[1] = {"role": "assistant", "content": _ANSWER, "tool_calls": _calls_for(new_messages)}
            text = self.text([*stand_in, *new_messages])
            before = self.text(stand_in, answer_follows=False)
            return text[len(before) :] if text.startswith(before) else None
        _, found, rest = text.partition(_ANSWER)
        _check_taken(new_messages, rest)
        return rest if found else None

    @functools.cached_property
    def _end_of_turn(self) -> int | None:
        """The id that the template writes right behind an answer; None: no token of its own."""
        stand_in = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        try:
            _, found, rest = self.text(stand_in, answer_follows=False).partition(_ANSWER)
        except TemplateRefused:
            return None
        ids = self.encode(rest)[:1] if found and rest else []
        return ids[0] if ids and ids[0] in self._special_ids else None

    @functools.cached_property
    def _special_ids(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        return frozenset({*self.tokenizer.all_special_ids, *added})

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the prompt ends inside a thought, which the answer then only closes."""
        tail = self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THINK_TAGS[0])

    # -- what the template does to earlier answers ---------------------------------------------------------

    def rewrites(self, new_messages: Sequence[Message], *, has_thoughts: bool) -> bool:
        """Whether history must be rendered anew for the sake of thoughts that the template leaves out."""
        if self.history == "extend" or not has_thoughts:
            return False
        user_speaks = any(message.get("role") == "user" for message in new_messages)
        return self._drops_thoughts_for_user if user_speaks else self._drops_thoughts_for_tool

    @functools.cached_property
    def _drops_thoughts_for_user(self) -> bool:
        return self._drops([{"role": "user", "content": "y"}], calls=False)

    @functools.cached_property
    def _drops_thoughts_for_tool(self) -> bool:
        result = {"role": "tool", "tool_call_id": _CALL["id"], "content": "y"}
        return self._drops([result], calls=True)

    def _drops(self, new_messages: Sequence[Message], *, calls: bool) -> bool:
        """Thoughts are shown in the last answer and no longer when messages follow it."""
        answer: Message = {"role": "assistant", "content": _ANSWER, "reasoning_content": _THOUGHT}
        if calls:
            answer["tool_calls"] = [_CALL]
        start = [{"role": "user", "content": "x"}, answer]
        try:
            shown = _THOUGHT in self.text(start, answer_follows=False)
            return shown and _THOUGHT not in self.text([*start, *new_messages])
        except TemplateRefused:
            return False

    def report(self) -> PrefixReport:
        """What `slime doctor` says of the template."""
        forks, refuses, extends = [], [], True
        kinds: dict[str, list[Message]] = {
            "a user message": [{"role": "user", "content": "y"}],
            "a tool result": [{"role": "tool", "tool_call_id": _CALL["id"], "content": "y"}],
            "a system message within the conversation": [
                {"role": "system", "content": "y"},
                {"role": "user", "content": "z"},
            ],
        }
        for name, messages in kinds.items():
            try:
                extends = extends and self.extension(messages, stop_id=None) is not None
            except TemplateRefused:
                refuses.append(name)
        try:
            self.first_prompt([{"role": "user", "content": "y"}], [_TOOL])
        except TemplateRefused:
            refuses.append("tools")
        if self._drops_thoughts_for_user:
            forks.append("a user message after an answer with thoughts")
        if self._drops_thoughts_for_tool:
            forks.append("a tool result after an answer with thoughts")
        return PrefixReport(extends, tuple(forks), tuple(refuses))


def _answers_calls(messages: Sequence[Message]) -> bool:
    return any(message.get("role") == "tool" for message in messages)


def _calls_for(messages: Sequence[Message]) -> list[Message]:
    """Calls that the tool results among these messages answer."""
    results = [message for message in messages if message.get("role") == "tool"]
    return [{**_CALL, "id": str(result.get("tool_call_id") or _CALL["id"])} for result in results]


def _check_taken(messages: Sequence[Message], text: str) -> None:
    """Templates skip roles they do not know without a word: the policy would not see what a tool said.

    A word of the message is looked for: templates may quote and trim, and leave thoughts of answers out.
    """
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        if message.get("role") == "assistant" or not isinstance(content, str):
            continue
        word = max(_WORD.findall(content), key=len, default="")
        if word not in text:
            raise TemplateRefused(
                f"the chat template of the model leaves out a message of role {message.get('role')!r}: "
                "it has no place for it"
            )


def _check_tools_taken(tools: Sequence[Any], text: str) -> None:
    for tool in tools:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        name = function.get("name")
        if isinstance(name, str) and name not in text:
            raise TemplateRefused(
                f"the chat template of the model has no place for tools: it leaves out {name!r}; describe "
                "the tools in a system message, or use a template with a tool section"
            )

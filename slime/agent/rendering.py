"""Renders messages to token ids with the model's chat template; sampled tokens are never tokenised again.

The first prompt of a conversation is rendered whole. Every later prompt is the existing ids plus the text
that the template writes *after a response*: the template renders a short placeholder conversation that ends
with a response, followed by the new messages, and the text after that response is used. So the cost of a turn
does not grow with the conversation, and sampled tokens stay as they are.

Some templates drop the thoughts of earlier responses once the user speaks again. If there are such thoughts,
the existing ids differ from what the template would write, and the conversation is rendered whole: the tree
forks (`history="template"`). With `history="extend"` the thoughts stay in the context.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slime.agent.shown_pictures import Placed, expanded, pictures_in
from slime.agent.trajectory import Message
from slime.data.media import bare_messages
from slime.utils.media.pictures import NotAnImage

History = Literal["template", "extend"]

_ANSWER = "Q7zANSWERzQ7"  # the response in the placeholder conversation
_THOUGHT = "Q7zTHOUGHTzQ7"
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "it", "parameters": {}}}
THINK_TAGS = ("<think>", "</think>")
_WORD = re.compile(r"[A-Za-z0-9]+")


class TemplateRefused(ValueError):
    """The model's chat template cannot write these messages."""


@dataclass(frozen=True, slots=True)
class PrefixReport:
    """Reports how a template renders earlier responses. `forks`: turns at which it changes the history."""

    extends: bool  # new messages can be rendered after a response at all
    forks: tuple[str, ...]
    refuses: tuple[str, ...]  # kinds of messages that the template does not accept


class Renderer:
    """Renders prompts with one tokenizer and one set of template arguments (such as `enable_thinking`)."""

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
        self.processor = processor  # of models that read images; None: text only
        self.template_kwargs = dict(template_kwargs or {})

    def first_prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Render the whole conversation, up to where the response starts."""
        text = self.text(messages, tools)
        _check_rendered(messages, text)
        _check_tools_rendered(tools or (), text)
        return self.encode(text)

    def text(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, answer_follows: bool = True
    ) -> str:
        """Return what the template writes; TemplateRefused if it raises."""
        try:
            text: str = self.tokenizer.apply_chat_template(
                bare_messages(list(messages)),  # templates only check that there is an image
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=answer_follows,
                **self.template_kwargs,
            )
        except Exception as error:  # a template is a program of its author: it may raise anything
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
        """Expand the images in rendered `messages` that follow `start` other ids."""
        pictures = pictures_in(messages)
        if self.processor is None:
            if pictures:
                raise TemplateRefused("the model reads text only, not images")
            return ids, []
        try:
            return expanded(ids, pictures, self.processor, start=start)
        except NotAnImage:
            raise
        except ValueError as error:
            raise TemplateRefused(
                f"the chat template of the model does not write each image where it is shown ({error})"
            ) from error

    def extension(self, new_messages: Sequence[Message], *, stop_id: int | None) -> list[int] | None:
        """Return the ids that follow a response; None: the whole conversation must be rendered.

        `stop_id` is the token that ended the response, None if it was truncated: then the template's own end
        of a turn is part of what follows.
        """
        text = self._after_response(new_messages)
        if text is None:
            return None
        ids = self.encode(text)
        # The sampled token replaces the one that the template would have written.
        ends_turn = stop_id is not None and bool(ids) and ids[0] in (stop_id, self._end_of_turn)
        return ids[1:] if ends_turn else ids

    def _after_response(self, new_messages: Sequence[Message]) -> str | None:
        stand_in: list[Message] = [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": _ANSWER},
        ]
        try:
            text = self.text([*stand_in, *new_messages])
        except TemplateRefused:
            ids = [one.get("tool_call_id") for one in new_messages if one.get("role") == "tool"]
            if not ids:
                raise
            # Some templates accept results only after their calls.
            stand_in[1]["tool_calls"] = [{**_CALL, "id": str(one or _CALL["id"])} for one in ids]
            text = self.text([*stand_in, *new_messages])
            before = self.text(stand_in, answer_follows=False)
            return text[len(before) :] if text.startswith(before) else None
        _, found, rest = text.partition(_ANSWER)
        _check_rendered(new_messages, rest)
        return rest if found else None

    @functools.cached_property
    def _end_of_turn(self) -> int | None:
        """The id that the template writes right after a response; None: no token of its own."""
        stand_in = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _ANSWER}]
        try:
            _, found, rest = self.text(stand_in, answer_follows=False).partition(_ANSWER)
        except TemplateRefused:
            return None
        ids = self.encode(rest) if found and rest else []
        special = {*self.tokenizer.all_special_ids, *self.tokenizer.added_tokens_decoder}
        return ids[0] if ids and ids[0] in special else None

    def opens_thought(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether the prompt ends inside a thought, which the response then only closes."""
        tail = self.tokenizer.decode(list(prompt_ids[-8:]), skip_special_tokens=False)
        return tail.rstrip().endswith(THINK_TAGS[0])

    # -- what the template does to earlier responses -------------------------------------------------------

    def rewrites(self, new_messages: Sequence[Message], *, has_thoughts: bool) -> bool:
        """Return whether history must be rendered again, because the template drops earlier thoughts."""
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
        """Return whether thoughts of the last response disappear when messages follow it."""
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
        """Return what the template does to earlier turns."""
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


def template_report(tokenizer: Any) -> PrefixReport:
    """Return what the chat template of a tokenizer does to earlier turns; `slime doctor` shows it."""
    return Renderer(tokenizer).report()


def _check_rendered(messages: Sequence[Message], text: str) -> None:
    """Refuse messages that the template silently skips, as it does with unknown roles.

    One word of each message is searched in the text: templates may quote and trim.
    """
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = " ".join(part.get("text", "") for part in content)
        if message.get("role") == "assistant" or not isinstance(content, str):
            continue
        longest = max(_WORD.findall(content), key=len, default="")
        if longest not in text:
            raise TemplateRefused(
                f"the chat template of the model leaves out a message of role {message.get('role')!r}: "
                "it does not support this role"
            )


def _check_tools_rendered(tools: Sequence[Any], text: str) -> None:
    for tool in tools:
        name = tool.get("function", tool).get("name", "")
        if name not in text:
            raise TemplateRefused(
                f"the chat template of the model has no place for tools: it leaves out {name!r}; describe "
                "the tools in a system message, or use a template with a tool section"
            )

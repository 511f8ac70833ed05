"""What an API is here: how its requests are read, and its answers and streams written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from slime.agent.adapters.bodies import Body
from slime.agent.adapters.chat_calls import Call
from slime.agent.adapters.client_errors import ApiError
from slime.agent.engine_access import Made
from slime.agent.history import Message
from slime.agent.parsing import ParsedModelOutput
from slime.agent.session import Asked, Session


@dataclass(slots=True)
class Reply:
    """An answer that is complete: what every protocol writes from."""

    call: Call
    session: Session
    asked: Asked
    made: Made
    parsed: ParsedModelOutput
    message: Message

    @property
    def num_prompt(self) -> int:
        return self.asked.num_prompt

    @property
    def tool_calls(self) -> list[dict[str, Any]]:
        return self.message.get("tool_calls") or []


class Stream(ABC):
    """The events of one streamed answer, as bytes."""

    @abstractmethod
    def start(self, num_prompt: int) -> bytes: ...

    @abstractmethod
    def piece(self, kind: str, text: str, new: Made | None) -> bytes: ...

    @abstractmethod
    def end(self, reply: Reply) -> bytes:
        """All that follows the last piece: calls, usage, how it ended."""

    @abstractmethod
    def error(self, error: ApiError) -> bytes: ...


class ClientDialect(ABC):
    """One API: how its requests are read and its answers written."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: Body) -> Call: ...

    @abstractmethod
    def answer(self, reply: Reply) -> dict[str, Any]: ...

    @abstractmethod
    def stream(self, call: Call) -> Stream: ...

    @abstractmethod
    def error(self, error: ApiError) -> dict[str, Any]: ...

    def key_in(self, body: Mapping[str, Any]) -> str | None:
        """A session's key that this protocol may carry in the body."""
        return None

    def count(self, num_tokens: int) -> dict[str, Any] | None:
        """The answer to a question for the length of a prompt; None: this API has no such question."""
        return None

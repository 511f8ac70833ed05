"""HTTP endpoints with the APIs of OpenAI and Anthropic, in front of the policy's engines."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from slime.agent.adapters.anthropic import AnthropicAdapter, Messages
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.openai import OpenAIAdapter, Responses
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.aiohttp_threaded import AppHandle, run_app_in_thread
from slime.agent.engine_access import engines_url
from slime.arguments import PluginArgs
from slime.utils.processing_utils import load_processor, load_tokenizer

__all__ = ["AgentAdapter", "AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "adapter_of"]


class AgentAdapter(BaseAdapter):
    """OpenAI's and Anthropic's APIs at one address (OpenAI's clients add /v1 to it)."""

    protocols = (ChatCompletions(), Responses(), Messages())
    handle: AppHandle | None = None

    @property
    def url(self) -> str:
        assert self.handle is not None, "the adapter has not been started: call `start`"
        return f"http://{self.handle.host}:{self.handle.port}"

    def start(self, host: str = "127.0.0.1", port: int = 0) -> AgentAdapter:
        """Serve from a thread of its own; port 0: the system chooses one."""
        self.handle = run_app_in_thread(self.app, host, port)
        return self

    def stop(self) -> None:
        if self.handle is not None:
            self.handle.stop()
            self.handle = None


_lock = threading.Lock()
_adapters: dict[str, AgentAdapter] = {}


async def adapter_of(
    args: PluginArgs, *, host: str = "127.0.0.1", port: int = 0, **options: Any
) -> AgentAdapter:
    """Return this process's adapter for the policy of a run, started on first use.

    `options` of the first call go to `BaseAdapter`. The adapter ends with the process; programs that outlive
    the process find the next one at the same `port`.
    """
    return await asyncio.to_thread(_adapter_of, args, host, port, options)


def _adapter_of(args: PluginArgs, host: str, port: int, options: dict[str, Any]) -> AgentAdapter:
    url = engines_url(args)
    with _lock:
        if url not in _adapters:
            if args.multimodal_keys:
                options = {"processor": load_processor(args.hf_checkpoint), **options}
            _adapters[url] = AgentAdapter(load_tokenizer(args.hf_checkpoint), url, **options).start(
                host, port
            )
        return _adapters[url]

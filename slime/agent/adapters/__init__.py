"""HTTP endpoints with the APIs of OpenAI and Anthropic, in front of the policy's engines."""

from slime.agent.adapters.anthropic import AnthropicAdapter
from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.of_run import AgentAdapter, adapter_of
from slime.agent.adapters.openai import OpenAIAdapter

__all__ = ["AgentAdapter", "AnthropicAdapter", "BaseAdapter", "OpenAIAdapter", "adapter_of"]

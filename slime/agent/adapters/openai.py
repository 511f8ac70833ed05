"""OpenAI's API for agents: chat completions and Responses."""

from slime.agent.adapters.common import BaseAdapter
from slime.agent.adapters.openai_chat import ChatCompletions
from slime.agent.adapters.openai_responses import Responses


class OpenAIAdapter(BaseAdapter):
    """Base url for clients: `http://HOST:PORT/v1`; the key is the session's id."""

    protocols = (ChatCompletions(), Responses())

"""Run where openai-agents is: an agent with a tool over Responses and over chat."""

import asyncio
import json
import sys

import agents
from openai import AsyncOpenAI

url, key = sys.argv[1:]
client = AsyncOpenAI(base_url=f"{url}/v1", api_key=key)
agents.set_tracing_disabled(True)
looked = []


@agents.function_tool
def look(at: str) -> str:
    """Look at something."""
    looked.append(at)
    return f"saw {at}"


async def main():
    outputs = []
    for model in (
        agents.OpenAIResponsesModel("m", client),
        agents.OpenAIChatCompletionsModel("m", client),
    ):
        agent = agents.Agent(name="a", instructions="Be brief.", model=model, tools=[look])
        result = await agents.Runner.run(agent, "look at it")
        outputs.append(result.final_output)
        streamed = agents.Runner.run_streamed(agent, "look at it, streamed")
        async for _ in streamed.stream_events():
            pass
        outputs.append(streamed.final_output)
    print(json.dumps({"outputs": outputs, "looked": looked}))


asyncio.run(main())

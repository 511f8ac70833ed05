"""Run where the openai package is: episodes over each of its APIs; prints what it saw."""

import json
import sys

import openai

url, key = sys.argv[1:]
client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}
CHAT_TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PARAMETERS}}]
TOOLS = [{"type": "function", "name": "look", "parameters": PARAMETERS, "strict": False}]
seen = []


def chat(stream):
    messages = [{"role": "user", "content": f"chat, stream {stream}"}]
    while True:
        options = {
            "model": "m",
            "messages": messages,
            "tools": CHAT_TOOLS,
            "logprobs": True,
            "max_tokens": 500,
        }
        if stream:
            with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as events:
                for _ in events:
                    pass
                answer = events.get_final_completion()
        else:
            answer = client.chat.completions.create(**options)
        choice = answer.choices[0]
        seen.append(
            {
                "api": f"chat {stream}",
                "text": choice.message.content,
                "finish": choice.finish_reason,
                "tokens": answer.usage.completion_tokens,
                "logprobs": [entry.logprob for entry in choice.logprobs.content],
            }
        )
        messages.append(choice.message.model_dump(exclude_none=True))
        if not choice.message.tool_calls:
            return
        for call in choice.message.tool_calls:
            result = f"saw {json.loads(call.function.arguments)['at']}"
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def responses(stream):
    items = [{"role": "user", "content": f"responses, stream {stream}"}]
    options = {"model": "m", "tools": TOOLS, "instructions": "be brief"}
    while True:
        if stream:
            with client.responses.stream(input=items, **options) as events:
                for _ in events:
                    pass
                answer = events.get_final_response()
        else:
            answer = client.responses.create(input=items, **options)
        seen.append(
            {"api": f"responses {stream}", "text": answer.output_text, "tokens": answer.usage.output_tokens}
        )
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        if not calls:
            return
        for call in calls:
            result = f"saw {json.loads(call.arguments)['at']}"
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


for way in (False, True):
    chat(way)
    responses(way)
for wrong in (
    lambda: client.chat.completions.create(model="m", messages="hi"),
    lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="nobody").models.with_raw_response.list(),
    lambda: openai.OpenAI(base_url=f"{url}/v1", api_key="nobody").chat.completions.create(
        model="m", messages=[{"role": "user", "content": "x"}]
    ),
):
    try:
        wrong()
        seen.append({"error": None})
    except openai.APIStatusError as error:
        seen.append({"error": type(error).__name__, "code": error.code})
print(json.dumps(seen))

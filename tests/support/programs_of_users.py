"""Generate and reward functions as programs for slime have them, over the names that they import."""

import aiohttp

from slime.agent.adapters import OpenAIAdapter
from slime.agent.aiohttp_threaded import run_app_in_thread
from slime.agent.harness import BaseHarness, HarnessContext
from slime.agent.sandbox import open_sandbox
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.misc import SingletonMeta
from slime.utils.types import Sample

SEEN = " seen "


async def asks_by_itself(args, sample: Sample, sampling_params) -> Sample:
    """Two requests of its own with what a tool says between them, all in token ids."""
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    ids, mask, log_probs = [], [], []
    for turn in range(2):
        payload = {"input_ids": prompt_ids + ids, "sampling_params": sampling_params, "return_logprob": True}
        output = await post(url, payload)
        reason = output["meta_info"]["finish_reason"]["type"]
        if reason == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        said = output["meta_info"]["output_token_logprobs"]
        ids += [item[1] for item in said]
        log_probs += [item[0] for item in said]
        mask += [1] * len(said)
        if turn == 0:
            seen = state.tokenizer(SEEN, add_special_tokens=False)["input_ids"]
            ids, mask, log_probs = ids + seen, mask + [0] * len(seen), log_probs + [0.0] * len(seen)
    sample.tokens = prompt_ids + ids
    sample.response, sample.response_length = state.tokenizer.decode(ids), len(ids)
    sample.loss_mask, sample.rollout_log_probs = mask, log_probs
    sample.status = Sample.Status.TRUNCATED if reason == "length" else Sample.Status.COMPLETED
    sample.metadata["turns_taken"] = 2
    return sample


class _Endpoint(metaclass=SingletonMeta):
    """One adapter of the process, in a thread of its own."""

    def __init__(self, args):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        self.adapter = OpenAIAdapter(GenerateState(args).tokenizer, url, max_turns_per_sid=4)
        self.handle = run_app_in_thread(self.adapter.app, "127.0.0.1", 0)


class Harness(BaseHarness):
    """A program of one's own, with nothing but the three steps and a note in the box."""

    async def install_cli(self, sandbox):
        await sandbox.exec("true", check=True)

    async def write_config(self, sandbox, context):
        await sandbox.write_file(f"{context.workdir}/endpoint", context.adapter_url)

    async def launch_and_wait(self, sandbox, context, prompt, time_budget_sec):
        assert await sandbox.read_file(f"{context.workdir}/endpoint") == context.adapter_url
        headers = {"Authorization": f"Bearer {context.session_id}"}
        messages = [{"role": "user", "content": prompt}]
        async with aiohttp.ClientSession(headers=headers) as http:
            for _ in range(2):
                body = {"model": context.model_label, "messages": messages}
                async with http.post(f"{context.adapter_url}/v1/chat/completions", json=body) as answer:
                    told = await answer.json()
                messages += [told["choices"][0]["message"], {"role": "user", "content": "on"}]
        return 0


async def runs_a_harness(args, sample: Sample, sampling_params) -> list[Sample]:
    endpoint = _Endpoint(args)
    adapter, handle = endpoint.adapter, endpoint.handle
    adapter.open_session(sample.session_id, sampling_params, args.rollout_max_context_len)
    async with open_sandbox(args.sandbox) as box:
        await box.exec("mkdir -p /tmp/work", check=True)
        context = HarnessContext("/tmp/work", sample.session_id, f"http://{handle.host}:{handle.port}")
        code = await Harness().run(box, context, str(sample.prompt), time_budget_sec=60)
    told = {"exit_code": code}
    return await adapter.finish_session(
        sample.session_id, base_sample=sample, reward=1.0, extra_metadata=told, wait_timeout=5
    )


async def reward_by_length(args, sample: Sample, **kwargs) -> float:
    return float(sample.response_length)

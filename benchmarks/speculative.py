"""What does speculation (n-gram, or by MTP heads) bring to a rollout, and does it keep the distribution?

Two SGLang servers serve the same model, one with `--speculative-algorithm NGRAM`. The model is of the 0.6B
shape and copies: after a token comes its successor in a short cycle with a probability that the temperature
sets, and any token of the vocabulary otherwise. So one model gives text from highly repetitive to random, at
the cost of a real one. For each temperature and number of requests at a time: tokens per second of both,
tokens per verification, and the share of successors, which must be the same with speculation and without.

    python benchmarks/speculative.py --write-model MODEL
    python -m sglang.launch_server --model-path MODEL --port 30000 --max-running-requests 64
    python -m sglang.launch_server --model-path MODEL --port 30001 --max-running-requests 64 \\
        --speculative-algorithm NGRAM --speculative-num-draft-tokens 8 --speculative-ngram-max-bfs-breadth 1
    python benchmarks/speculative.py --plain-url http://127.0.0.1:30000 \\
        --speculative-url http://127.0.0.1:30001

In a run the same server is had by `--sglang-speculative-algorithm NGRAM` and so on. With `--mtp-head` the
model is a MiMo with one head that has yet to learn what the next token but one is: train it by
`--enable-mtp-training`, and compare the servers before and after (benchmarks/RESULTS.md, MTP heads).
"""

import argparse
import asyncio
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from shapes import SHAPES, qwen3_config, write_model

STATES, CYCLE = 1024, 16  # token t is in state t % STATES; a cycle goes through CYCLE states
COPY = 0.9  # probability of the successor at temperature 1
PROMPT_TOKENS = 64
# What the hub's MiMo folders bring, as transformers knows no such type.
_CONFIG_CODE = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write-model", type=Path, help="write the model to this folder, and end")
    parser.add_argument("--mtp-head", action="store_true", help="the written model has a head, untrained")
    parser.add_argument("--shape", default="0.6b", choices=tuple(SHAPES))
    parser.add_argument("--plain-url")
    parser.add_argument("--speculative-url")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 1.1, 1.2, 2.0])
    parser.add_argument("--output-tokens", type=int, default=256)
    parser.add_argument("--waves", type=int, default=4, help="requests, times those at a time")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/speculative.json"))
    options = parser.parse_args()
    if options.write_model is None and not (options.plain_url and options.speculative_url):
        parser.error("give --plain-url and --speculative-url, or --write-model FOLDER")
    return options


def successor(token: int) -> int:
    state = token % STATES
    return state - state % CYCLE + (state + 1) % CYCLE


def write_copying_model(shape: str, folder: Path, mtp_head: bool) -> None:
    """Layers add nothing to the embedding of a token; the head turns that into its successor."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3ForCausalLM

    write_model(shape, folder, weights=False)
    config, kind = qwen3_config(shape), Qwen3ForCausalLM
    config.tie_word_embeddings = False
    if mtp_head:
        named = {**config.to_dict(), "layer_types": None, "num_hidden_layers": config.num_hidden_layers + 1}
        config, kind = Qwen2Config(**{k: v for k, v in named.items() if k != "head_dim"}), Qwen2ForCausalLM
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model = kind._from_config(config, dtype=torch.bfloat16)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        vocab, width = config.vocab_size, config.hidden_size
        states = torch.nn.functional.normalize(torch.randn(STATES, width), dim=1)
        head = torch.nn.functional.normalize(torch.randn(vocab, width), dim=1)
        for state in range(STATES):
            head[successor(state)] = states[state]
        model.model.embed_tokens.weight.copy_(states[torch.arange(vocab) % STATES])
        model.lm_head.weight.copy_(head * head_scale(vocab, width))
    model.save_pretrained(folder)
    if mtp_head:
        _last_layer_to_head(folder)


def _last_layer_to_head(folder: Path) -> None:
    """Make a MiMo of a Qwen2: its last layer becomes the head's, which begins with a random projection."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] -= 1
    config.pop("layer_types", None)
    config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    config["auto_map"] = {"AutoConfig": "configuration_mimo.MiMoConfig"}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    (folder / "configuration_mimo.py").write_text(_CONFIG_CODE)
    last, head = f"model.layers.{config['num_hidden_layers']}.", "model.mtp_layers.0."
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace(last, head): tensor for name, tensor in tensors.items()}
    width = config["hidden_size"]
    ones = torch.ones(width, dtype=torch.bfloat16)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{head}{norm}.weight"] = ones.clone()
    joined = torch.randn(width, 2 * width) / math.sqrt(2 * width)
    tensors[f"{head}input_proj.weight"] = joined.bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def head_scale(vocab: int, width: int) -> float:
    """c in sqrt(width) c = log(odds x the mass of all others), whose scores are normal with deviation c."""
    scale, goal = 0.0, math.log(COPY / (1 - COPY) * vocab)
    for _ in range(20):
        scale = (goal + scale**2 / 2) / math.sqrt(width)
    return scale


@dataclass(frozen=True)
class Answers:
    """What one server said to all requests of one setting."""

    seconds: float
    tokens: int
    verifications: int  # 0: nothing was drafted
    copies: int  # tokens that are the successor of the one before
    told: float  # mean probability that the server tells of those

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def copy_share(self) -> float:
        return self.copies / self.tokens


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Each goes around one cycle."""
    rng, prompts = random.Random(seed), []
    for _ in range(count):
        prompt = [rng.randrange(STATES)]
        while len(prompt) < PROMPT_TOKENS:
            prompt.append(successor(prompt[-1]))
        prompts.append(prompt)
    return prompts


async def ask(url: str, prompts: list[list[int]], concurrency: int, sampling: dict[str, Any]) -> Answers:
    slots = asyncio.Semaphore(concurrency)

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> dict[str, Any]:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        async with slots, session.post(f"{url}/generate", json=body) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer

    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency), timeout=timeout
    ) as session:
        started = time.perf_counter()
        answers = await asyncio.gather(*(one(session, prompt) for prompt in prompts))
        seconds = time.perf_counter() - started
    made = [[entry[:2] for entry in a["meta_info"]["output_token_logprobs"]] for a in answers]
    copied = [
        log_prob
        for prompt, answer in zip(prompts, made, strict=True)
        for before, (log_prob, token) in zip([prompt[-1], *(t for _, t in answer)], answer, strict=False)
        if token == successor(before)
    ]
    verifications = sum(a["meta_info"].get("spec_verify_ct", 0) for a in answers)
    told = statistics.fmean(map(math.exp, copied)) if copied else math.nan
    return Answers(seconds, sum(map(len, made)), verifications, len(copied), told)


def compare(options: argparse.Namespace, temperature: float, concurrency: int) -> dict[str, Any]:
    prompts = make_prompts(options.waves * concurrency, seed=concurrency)
    sampling = {
        "temperature": temperature,
        "max_new_tokens": options.output_tokens,
        "ignore_eos": True,
    }
    urls = {"plain": options.plain_url, "speculative": options.speculative_url}
    made: dict[str, Answers] = {}
    for side, url in urls.items():
        asyncio.run(ask(url, prompts[:concurrency], concurrency, {**sampling, "max_new_tokens": 32}))
        made[side] = asyncio.run(ask(url, prompts, concurrency, sampling))
    plain, drafted = made["plain"], made["speculative"]
    share = (plain.copies + drafted.copies) / (plain.tokens + drafted.tokens)
    error = math.sqrt(share * (1 - share) * (1 / plain.tokens + 1 / drafted.tokens))
    return {
        "temperature": temperature,
        "concurrency": concurrency,
        "plain_rate": plain.rate,
        "speculative_rate": drafted.rate,
        "speed_up": drafted.rate / plain.rate,
        "tokens_per_verification": drafted.tokens / drafted.verifications if drafted.verifications else None,
        "copy_share": {"plain": plain.copy_share, "speculative": drafted.copy_share},
        "deviations": (drafted.copy_share - plain.copy_share) / error if error else 0.0,
        "told": {"plain": plain.told, "speculative": drafted.told},
        "tokens": drafted.tokens,
    }


def report(rows: list[dict[str, Any]]) -> None:
    print("temp  at a time  plain tok/s  spec tok/s  ratio  tok/verify  copied plain/spec  deviations")
    for row in rows:
        per, share = row["tokens_per_verification"], row["copy_share"]
        print(f"{row['temperature']:4.1f} {row['concurrency']:10d} {row['plain_rate']:12.0f} "
              f"{row['speculative_rate']:11.0f} {row['speed_up']:6.2f} {per if per else 0:11.2f} "
              f"    {share['plain']:.4f}/{share['speculative']:.4f} {row['deviations']:11.1f}",
              flush=True)  # fmt: skip


def main() -> int:
    options = parse()
    if options.write_model is not None:
        write_copying_model(options.shape, options.write_model, options.mtp_head)
        return 0
    rows = []
    for temperature in options.temperatures:
        for concurrency in options.concurrency:
            try:
                rows.append(compare(options, temperature, concurrency))
            except aiohttp.ClientConnectionError as error:
                sys.exit(f"no server answers: {error}")
            report(rows[-1:])
            options.json.parent.mkdir(parents=True, exist_ok=True)
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    report(rows)
    return 0 if max(abs(row["deviations"]) for row in rows) < 4 else 1


if __name__ == "__main__":
    sys.exit(main())

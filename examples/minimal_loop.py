"""GRPO in one file, on the public parts: data source, engine client, trainer, weight
push. No cluster, no Ray; runs on a CPU.

The reward is the share of vowels in the answer. A model with random weights
learns to write them within a dozen steps:

    python examples/minimal_loop.py
"""

import asyncio
import json
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from slime.arguments import Args, parse_args
from slime.backends import TrainBackend, create_backend
from slime.batch.convert import samples_to_batch
from slime.batch.split import split_for_ranks
from slime.cli.quickstart import tiny
from slime.engines.embedded.command import embedded_command
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.rollout.data_source import RolloutDataSource
from slime.step.training_step import TrainingStep
from slime.utils.http_utils import close_session
from slime.utils.machine import shm
from slime.utils.machine.children import thread_environment
from slime.utils.types import Sample
from slime.weight_sync.base import Sender, SenderOptions, check_receipt
from slime.weight_sync.transports import transport_of
from slime.wire.client import EngineClient
from slime.wire.control import EngineControl
from slime.wire.protocol import GenerateRequest, SamplingParams

NUM_STEPS, MAX_NEW_TOKENS = 12, 16


def settings(folder: Path) -> Args:
    """A small model and prompts, and the flags of a run; every flag of `slime train` may stand here."""
    tiny.make_checkpoint(folder / "model", seed=0)
    rows = [{"input": f"{n}>", "label": ""} for n in range(1000)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"--hf-checkpoint {folder}/model --prompt-data {folder}/prompts.jsonl --rollout-batch-size 16"
    flags += f" --n-samples-per-prompt 8 --rollout-max-response-len {MAX_NEW_TOKENS}"
    flags += f" --num-rollout {NUM_STEPS} --lr 5e-3 --lr-decay-style constant --dtype float32"
    flags += " --use-dynamic-batch-size --max-tokens-per-gpu 8192"
    return parse_args(flags.split())


def start_engine(folder: Path) -> EngineServer:
    command = embedded_command(
        model_path=str(folder / "model"), shm_prefix="slime-minimal", await_weights=True
    )
    server = EngineServer(LaunchPlan("engine", command, thread_environment(1), folder / "engine.log", 300.0))
    server.launch()
    server.wait_ready()
    return server


async def answer(client: EngineClient, tokenizer, sample: Sample) -> None:
    """Tokens, log-probs and weight version from the engine, then the reward."""
    sample.tokens = tokenizer.encode(sample.prompt)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=MAX_NEW_TOKENS, sampling_seed=sample.index + 1)
    generation = await client.generate(GenerateRequest(input_ids=sample.tokens, sampling=sampling))
    text = tokenizer.decode(generation.ids, skip_special_tokens=True)
    sample.append_response_tokens(
        tokens=generation.ids, log_probs=generation.log_probs, text=text, meta_info=dict(generation.meta)
    )
    sample.reward = sum(letter in "aeiou" for letter in text) / MAX_NEW_TOKENS


async def push(backend: TrainBackend, sender: Sender, control: EngineControl, version: str) -> None:
    for bucket in backend.export():
        sender.send(bucket)
    bundle = sender.finish(version)
    await control.pause("retract")
    await control.flush()
    receipt = await transport_of(bundle.transport).deliver(bundle, control, await control.info())
    check_receipt(bundle, receipt, control.url)
    await control.resume()


async def main() -> list[float]:
    torch.set_num_threads(1)  # the engine beside us needs a core too
    with tempfile.TemporaryDirectory() as name:
        args, server = settings(Path(name)), start_engine(Path(name))
        client, control = EngineClient(server.url), EngineControl(server.url)
        dist.init_process_group("gloo", init_method=f"file://{name}/ranks", rank=0, world_size=1)
        backend = create_backend(args, rank=0, world_size=1, device="cpu")
        sender = transport_of("shared_memory").make_sender(
            SenderOptions("slime-minimal", Path(name), args.hf_checkpoint)
        )
        source, tokenizer, rewards = RolloutDataSource(args), tiny.build_tokenizer(), []
        for step in range(NUM_STEPS):
            await push(backend, sender, control, f"minimal:{step + 1}")
            groups = source.get_samples(args.rollout_batch_size)
            samples = [sample for group in groups for sample in group]
            await asyncio.gather(*(answer(client, tokenizer, sample) for sample in samples))
            (share,) = split_for_ranks(args, samples_to_batch(args, samples), 1)
            metrics = TrainingStep(backend, args, step, share, weight_version=step + 1).run().summary
            rewards.append(sum(sample.reward for sample in samples) / len(samples))
            print(f"step {step:2d}: reward {rewards[-1]:.3f}, grad norm {metrics['train/grad_norm']:.3f}")
        await close_session()
        sender.close()
        server.stop()
        dist.destroy_process_group()
    shm.unlink_prefix("slime-minimal")
    return rewards


if __name__ == "__main__":
    asyncio.run(main())

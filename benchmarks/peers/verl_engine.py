"""Training steps of verl's FSDP engine on a batch that another program wrote; runs in verl's environment.

verl has no platform for a CPU: one is registered here by its own registry. The file named by the only
argument holds the model's folder, the batch, the precision and where to write what was measured.
"""

import contextlib
import functools
import json
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

try:
    from tensordict import TensorDict
    from verl.plugin.platform.platform_base import PlatformBase
    from verl.plugin.platform.platform_manager import PlatformRegistry
except ModuleNotFoundError as error:
    sys.exit(f"{error}: use an environment that benchmarks/peers/make_verl_env.sh makes")


def answer(value):
    """A method that answers this, whatever it is asked."""
    return lambda *_args, **_kwargs: value


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "cpu"
    device_module = torch.cpu

    is_available = is_ipc_supported = answer(True)
    current_device = answer("cpu")
    device_count = answer(1)
    get_device_capability = answer((None, None))
    communication_backend_name = answer("gloo")
    visible_devices_envvar = answer("NO_DEVICES")
    ray_resource_name = answer("CPU")
    ray_noset_envvars = answer([])
    nvtx_range = answer(contextlib.nullcontext())
    manual_seed = manual_seed_all = answer(None)
    set_device = synchronize = set_allocator_settings = empty_cache = answer(None)
    profiler_start = profiler_stop = cudart = answer(None)


def make_engine(asked):
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    model = HFModelConfig(
        path=asked["model"],
        load_tokenizer=False,
        enable_gradient_checkpointing=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "sdpa"},
    )
    precision = dict.fromkeys(("param_dtype", "reduce_dtype", "buffer_dtype"), asked["dtype"])
    engine = FSDPEngineWithLMHead(
        model,
        FSDPEngineConfig(
            strategy="fsdp2",
            dtype=asked["dtype"],
            mixed_precision={**precision, "reduce_dtype": "fp32"},
            use_torch_compile=False,
            max_token_len_per_gpu=asked["max_tokens"],
        ),
        FSDPOptimizerConfig(
            lr=asked["lr"], betas=(0.9, 0.95), weight_decay=0.0, clip_grad=1.0, total_training_steps=1000
        ),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def jagged(rows, dtype):
    return torch.nested.as_nested_tensor(
        [torch.tensor(row, dtype=dtype) for row in rows], layout=torch.jagged
    )


def make_batch(asked, device):
    from verl.utils import tensordict_utils as tu

    rows, answers = asked["tokens"], asked["response_lengths"]
    prompts = [row[: len(row) - length] for row, length in zip(rows, answers, strict=True)]
    replies = [row[len(row) - length :] for row, length in zip(rows, answers, strict=True)]
    data = TensorDict(
        {
            "input_ids": jagged(rows, torch.long),
            "position_ids": jagged([range(len(row)) for row in rows], torch.long),
            "prompts": jagged(prompts, torch.long),
            "responses": jagged(replies, torch.long),
            "response_mask": jagged([[1] * length for length in answers], torch.long),
            "loss_mask": jagged([[1] * length for length in answers], torch.long),
            "old_log_probs": jagged(asked["old_log_probs"], torch.float32),
            "advantages": jagged(asked["advantages"], torch.float32),
        },
        batch_size=[len(rows)],
    ).to(device)
    tu.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=asked["max_tokens"],
        global_batch_size=len(rows),
        calculate_entropy=True,
        pad_token_id=0,
        max_response_len=max(answers),
        max_seq_len=max(map(len, rows)),
    )
    return data


def main():
    asked = json.loads(Path(sys.argv[1]).read_text())
    device = torch.device(asked["device"])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    torch.set_num_threads(asked["threads"])
    import verl
    from verl.workers.config import FSDPActorConfig
    from verl.workers.utils.losses import ppo_loss

    engine, batch = make_engine(asked), make_batch(asked, device)
    config = FSDPActorConfig(
        strategy="fsdp2", use_dynamic_bsz=True, rollout_n=1, ppo_mini_batch_size=len(asked["tokens"])
    )
    loss = functools.partial(ppo_loss, config)
    spent, first = [], None
    with engine.train_mode():
        for _ in range(asked["steps"]):
            started = time.perf_counter()
            metrics = engine.train_batch(batch.clone(), loss)["metrics"]
            if device.type == "cuda":
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - started)
            first = first or {"grad_norm": metrics["grad_norm"], "metrics": repr(metrics)[:2000]}
    found = {"steps_s": spent, "version": verl.__version__, "torch": torch.__version__, **first}
    Path(asked["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

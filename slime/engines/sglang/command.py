"""The command line of one SGLang server under its supervisor."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime.arguments import Args
from slime.arguments.groups.trained_sampling import replays_nucleus
from slime.catalog.vision import VISION_FAMILIES
from slime.engines.engine_process import MEETING_POINT, Command
from slime.engines.launch_plan import EngineSite
from slime.engines.sglang.supervisor import NCCL_PORT, PORT
from slime.utils.misc import is_installed
from slime.utils.models.model_config import read_config

_HERE = Path(__file__).parent
# Settings of a server on a machine without a GPU.
_CPU_WORDS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-overlap-schedule", "--sleep-on-idle"),
)
_AT_A_TIME, _MEETING = "--max-running-requests", ("--dist-init-addr", MEETING_POINT)
_ATTENTION_GROUPS = {"--enable-dp-attention", "--attn-dp-size", "--attention-data-parallel-size"}
_CPU_MAX_TOTAL_TOKENS, _CPU_MAX_RUNNING = 65536, 64
# Layers of --lora-target-modules all-linear in the dense families: a server must know them before it gets
# adapters.
_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class SGLangOptions:
    """Options of a server that slime sets. `extra`: the user's own flags, which come last and win."""

    python: str
    model_path: str
    cpu: bool
    dtype: str  # "auto": from the model's config
    tensor_parallel: int
    seed: int
    memory_saver: bool
    # On GPUs only: on a CPU SGLang refuses it.
    deterministic: bool = False
    weight_version: str = "default"
    host: str = "127.0.0.1"
    most_requests: int | None = None  # requests that are sent to it at a time, if known
    node: int = 0  # this machine among `num_nodes` that the server spans
    num_nodes: int = 1
    extra: Sequence[str] = ()


def run_command(args: Args, site: EngineSite) -> Command:
    """Return the command that starts a server of a run."""
    assert args.sglang_python is not None, "rules of the arguments find SGLang's interpreter"
    cpu = not site.gpu_ids
    return sglang_command(
        SGLangOptions(
            python=args.sglang_python,
            model_path=site.model_path,
            cpu=cpu,
            # The trainer's, so that both have the same distribution.
            dtype=args.dtype if args.dtype != "auto" else "float32" if cpu else "bfloat16",
            tensor_parallel=site.place.num_gpus,
            seed=args.seed,
            # The memory of a model without pushes could not be restored.
            memory_saver=bool(args.offload_rollout) and site.update_weights and not cpu,
            deterministic=args.deterministic_mode and not cpu,
            host=site.host,
            most_requests=args.sglang_server_concurrency,
            node=site.place.node,
            num_nodes=site.place.num_nodes,
            extra=(
                *_image_words(site),
                *(_pushed_words(args, site) if site.update_weights else ()),
                *args.sglang_options,
                *site.place.words,
            ),
        )
    )


def run_environment(args: Args, site: EngineSite) -> dict[str, str]:
    """Return variables of a server's process."""
    found = {"SGLANG_HOST_IP": site.host} if site.place.num_nodes > 1 else {}
    if site.update_weights and not (args.freeze_vision_tower or args.lora_rank) and _sees(site):
        # SGLang caches features of images by hash, and weight updates do not clear that cache: known images
        # would keep features of the old tower.
        found["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    if replays_nucleus(args):
        found["SGLANG_ENABLE_DISAGG_SAMPLING_MASK"] = "1"  # prefill servers report the first token's ids
    return found


def num_threads(model: Path, cores: int) -> int:
    """Return how many threads each process computes with: the threads of several would compete."""
    return 1


def _sees(site: EngineSite) -> bool:
    return read_config(site.model_path).get("model_type") in VISION_FAMILIES


def _image_words(site: EngineSite) -> list[str]:
    """Return flags with which images are resized as by our processor: pixels must equal the trainer's."""
    backend = "torchvision" if is_installed("torchvision") else "pil"
    return ["--image-processor-backend", backend] if _sees(site) else []


def _pushed_words(args: Args, site: EngineSite) -> list[str]:
    """Return flags of a server that receives the trainer's weights."""
    words = ["--enable-return-routed-experts"] if args.use_rollout_routing_replay else []
    if site.quantization:
        # FP8 is served without an FP8 checkpoint: the first push sends all weights.
        config = json.dumps({"quantization_config": site.quantization})
        words += ["--load-format", "dummy", "--json-model-override-args", config]
    if args.lora_sync == "adapter":
        # Memory for adapters is reserved in advance: one adapter, and requests without any, such as health
        # probes.
        targets = args.lora_target_modules
        words += ["--enable-lora", "--max-lora-rank", str(args.lora_rank), "--max-loras-per-batch", "2"]
        words += ["--lora-target-modules", *(_LINEAR_LAYERS if targets == ["all-linear"] else targets)]
        words += [] if site.gpu_ids else ["--lora-backend", "torch_native"]
    return words


def server_words(options: SGLangOptions) -> list[str]:
    """Return the server's own arguments; the supervisor fills in the ports."""
    given = {word.partition("=")[0] for word in options.extra if word.startswith("--")}
    words = ["--model-path", options.model_path, "--host", options.host, "--port", PORT]
    words += ["--nccl-port", NCCL_PORT, "--dtype", options.dtype, "--random-seed", str(options.seed)]
    words += ["--weight-version", options.weight_version, "--tp-size", str(options.tensor_parallel)]
    if options.num_nodes > 1:
        words += ["--nnodes", f"{options.num_nodes}", "--node-rank", f"{options.node}", *_MEETING]
    elif given & _ATTENTION_GROUPS:
        # Else SGLang derives their ports from its own, and they may be taken.
        words += _MEETING
    if options.cpu:
        words += _CPU_WORDS
        limits = {"--max-total-tokens": _CPU_MAX_TOTAL_TOKENS, _AT_A_TIME: _CPU_MAX_RUNNING}
        words += [word for name, limit in limits.items() if name not in given for word in (name, str(limit))]
    elif options.most_requests and "--speculative-algorithm" in given and _AT_A_TIME not in given:
        # With speculation a server's default is 48 requests; others wait.
        words += [_AT_A_TIME, str(options.most_requests)]
    if options.memory_saver:
        words += ["--enable-memory-saver"]
    if options.deterministic and "--enable-deterministic-inference" not in given:
        words += ["--enable-deterministic-inference"]
    return [*words, *options.extra]


def sglang_command(options: SGLangOptions) -> Command:
    """Return an engine's command: it gets the port to bind (0: any), a ready file and the life pipe's fd."""

    def command(port: int, ready_file: Path, life_fd: int) -> list[str]:
        # -P: the folder of these scripts must not be on the path, where its files could hide other modules.
        words = [sys.executable, "-P", str(_HERE / "supervisor.py"), "--host", options.host]
        words += ["--port", str(port), "--ready-file", str(ready_file), "--life-fd", str(life_fd)]
        words += [] if options.cpu else ["--beside", str(_HERE / "build_kernels.py")]
        return [*words, "--", options.python, "-P", str(_HERE / "run_server.py"), *server_words(options)]

    return command

"""`slime serve`: serve a trained model with OpenAI's endpoints, until Ctrl-C."""

import argparse
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from slime.arguments import default_args
from slime.arguments.core.devices import visible_gpus
from slime.catalog.deadlines import timeout_s
from slime.catalog.engines import DEFAULT_ENGINE, ENGINES
from slime.cli.bounded_numbers import MOST_GPUS, between
from slime.cli.export import ADAPTER_CONFIG, merge_adapter
from slime.cli.main import user_errors
from slime.cli.tasks import model_folder
from slime.engines.engine_process import EngineServer, LaunchPlan
from slime.engines.launch_plan import EnginePlace, EngineSite
from slime.preflight.models import why_no_config
from slime.utils.errors import EndedBySignal, RunStopped
from slime.utils.files.safetensors_files import damaged_files
from slime.utils.http_utils import TOKEN_VARIABLE, is_loopback
from slime.utils.machine import ports, shm
from slime.utils.machine.children import import_environment, thread_environment
from slime.utils.machine.cores import num_cores
from slime.utils.machine.own_command import as_typed
from slime.utils.models.model_config import read_config
from slime.utils.models.model_files import check_model

_PORT = 8000  # the default, if it is free


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors(), contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slime-serve-")))
        model, port = _find_model(options.model, scratch), _find_port(options.host, options.port)
        if not is_loopback(options.host) and not os.environ.get(TOKEN_VARIABLE):
            raise ValueError(
                f"--host is {options.host}: other machines would reach the engine. Set {TOKEN_VARIABLE} to a "
                "secret, here and where its clients run, or use 127.0.0.1."
            )
        plan = _plan(options, model, stack, scratch / "engine.log")
        with contextlib.suppress(KeyboardInterrupt), _served(plan, port) as server:
            print(_usage(server.url), flush=True)
            while server.alive():
                time.sleep(0.2)
            raise RunStopped(f"the engine {server.describe_end()}")
    print("stopped: the engine has ended")
    return 0


@contextlib.contextmanager
def _served(plan: LaunchPlan, port: int) -> Iterator[EngineServer]:
    """Start the engine and yield it once it serves; it ends with the block or at SIGTERM."""

    def end(number: int, _: object) -> None:
        raise EndedBySignal(number)

    before = signal.signal(signal.SIGTERM, end)
    server = EngineServer(plan, port)
    try:
        server.launch()
        print(f"Loading the model ({plan.name}) ...", flush=True)
        server.wait_ready()
        yield server
    finally:
        server.stop()
        signal.signal(signal.SIGTERM, before)


def _plan(options: argparse.Namespace, model: str, stack: contextlib.ExitStack, log: Path) -> LaunchPlan:
    """Return how to start the engine: like that of a run without weight syncs."""
    kind, prefix = ENGINES[options.engine], shm.make_prefix()
    stack.callback(shm.unlink_prefix, prefix)
    python = kind.rules.interpreter(options.sglang_python, f"--engine {options.engine}")
    args = default_args(hf_checkpoint=model, rollout_engine=options.engine, **python)
    gpus = min(visible_gpus(), options.num_gpus)
    place = EnginePlace("engine", "model", "regular", 0, tuple(range(gpus)), max(gpus, 1))
    threads = kind.command.num_threads(Path(model), num_cores())
    site = EngineSite(model, False, place, place.gpu_ids, options.host, prefix, threads)
    imports = {} if kind.own_python else import_environment()
    return LaunchPlan(
        name=kind.label,
        command=kind.command.run_command(args, site),
        env={**thread_environment(threads), **imports, **kind.command.run_environment(args, site)},
        log_path=log,
        start_timeout_s=timeout_s(args, "engine-start"),
        host=options.host,
        token=os.environ.get(TOKEN_VARIABLE),
    )


def _find_model(given: str, scratch: Path) -> str:
    """Return the folder of a model, of a run's last model, or of an adapter merged into its model."""
    if (Path(given).expanduser() / ADAPTER_CONFIG).is_file():
        merge_adapter(Path(given).expanduser(), scratch / "merged")
        return str(scratch / "merged")
    folder = Path(model_folder(given)).expanduser()
    if not folder.exists():
        raise ValueError(f"{given}: there is no such folder; give the folder of a model or of a run.")
    if not (folder / "config.json").is_file():
        advice = f"`{as_typed('export', given, '--out', 'MODEL')}` writes one from a checkpoint"
        raise ValueError(f"{given} holds no model (config.json is missing); {advice}.")
    if any("SequenceClassification" in name for name in read_config(folder).get("architectures") or ()):
        raise ValueError(f"{given} is a reward model, which generates nothing.")
    check_model("RUN", str(folder), tokenizer=True, whole=True)
    if why := why_no_config(str(folder)) or next(damaged_files(folder), None):
        raise ValueError(why)
    return str(folder.absolute())


def _find_port(host: str, asked: int | None) -> int:
    if asked and not ports.is_port_available(asked, host):
        raise ValueError(f"--port {asked} is in use: give another one, or leave the choice to slime.")
    if asked is not None:
        return asked
    return _PORT if ports.is_port_available(_PORT, host) else 0


def _usage(url: str) -> str:
    token = f' -H "Authorization: Bearer ${TOKEN_VARIABLE}"' if os.environ.get(TOKEN_VARIABLE) else ""
    body = '{"model": "default", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 64}'
    return "\n".join(
        [
            f"OpenAI-compatible endpoint: {url}/v1",
            f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{token} -d '{body}'",
            "Ctrl-C ends it.",
        ]
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime serve", description=__doc__.partition(":")[2].strip())
    add = parser.add_argument
    add("model", metavar="RUN", help="folder of a run, of a model, or of a peft adapter")
    add("--engine", choices=tuple(ENGINES), default=DEFAULT_ENGINE, help=f"[{DEFAULT_ENGINE}]")
    add("--host", default="127.0.0.1", help="address to listen on [127.0.0.1: this machine alone]")
    add("--port", type=between(0, 65535, int), help=f"[{_PORT}, or any free port]")
    gpus = between(1, MOST_GPUS, int)
    add("--num-gpus", type=gpus, default=1, metavar="N", help="GPUs of one SGLang engine [1]")
    add("--sglang-python", metavar="PATH", help="interpreter that has SGLang")
    return parser

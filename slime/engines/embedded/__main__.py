"""`python -m slime.engines.embedded`: load a model, serve it, die with the parent."""

import argparse
import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from slime.liveness import stacks
from slime.utils.http_utils import TOKEN_VARIABLE, is_loopback
from slime.utils.machine import children, garbage, shm
from slime.utils.machine.open_files import raise_limit
from slime.utils.machine.ports import family_of, with_port

if TYPE_CHECKING:
    from slime.engines.embedded.http_server import Server


_BACKLOG = 1 << 14  # connections that wait to be accepted; the system may allow fewer (net.core.somaxconn)
_TAKEN_AT_ONCE = 64  # accepted at a time; asyncio retries as many times if the first fails


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime.engines.embedded", description=__doc__)
    add = parser.add_argument
    add("--model-path", required=True, help="folder of a Hugging Face checkpoint")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=0, help="0: the system chooses; see --ready-file")
    add("--ready-file", type=Path, help='where to write {"port", "pid"} once requests are served')
    add("--life-fd", type=int, help="inherited pipe; the process ends when it reads end-of-file")
    add("--shm-prefix", help="shared-memory segments with this prefix are removed on the parent's death")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    add("--threads", type=int, help="CPU threads of the model (default: torch's)")
    add("--max-running-requests", type=int, default=256)
    add("--max-total-tokens", type=int, help="size of the KV pool (default: derived from memory)")
    add("--seed", type=int, default=0, help="seed of the seeds for requests without one")
    add("--await-weights", action="store_true", help="respond 503 to /generate until weights arrive")
    fp8_help = "rows and columns: weights arrive as FP8 in such blocks"
    add("--fp8-block", type=int, nargs=2, help=fp8_help)
    experts_help = "responses can say which experts each token was sent to"
    add("--enable-return-routed-experts", action="store_true", help=experts_help)
    add("--weight-version", default="default")
    add("--log-level", default="info")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    if not is_loopback(args.host) and not os.environ.get(TOKEN_VARIABLE):
        sys.exit(
            f"--host is {args.host}: other machines could control this engine without authentication. Set "
            f"{TOKEN_VARIABLE} to a secret here and where its clients run, or use 127.0.0.1."
        )
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s engine %(levelname)s %(message)s")
    stacks.answer_signal()
    garbage.search_seldom()
    if args.life_fd is not None:
        children.watch_parent(
            args.life_fd, lambda: shm.unlink_prefix(args.shm_prefix) if args.shm_prefix else None
        )
    # Small tensor operations release the interpreter lock hundreds of times per step; with the default of 5
    # ms each could wait that long for the HTTP thread.
    sys.setswitchinterval(2e-4)
    if args.threads:
        import torch  # late: parsing and --help stay fast

        torch.set_num_threads(args.threads)
    asyncio.run(_serve(args))


def _make_server(args: argparse.Namespace) -> "Server":
    # late: these import torch and transformers
    import slime
    from slime.engines.embedded.engine import Engine
    from slime.engines.embedded.http_server import Server, make_static_info
    from slime.engines.embedded.runner import ModelRunner
    from slime.engines.embedded.text import Detokenizer

    runner = ModelRunner(
        args.model_path,
        device=args.device,
        dtype=args.dtype,
        max_running=args.max_running_requests,
        max_total_tokens=args.max_total_tokens,
        fp8_block=tuple(args.fp8_block) if args.fp8_block else None,
        records_experts=args.enable_return_routed_experts,
    )
    engine = Engine(
        runner,
        Detokenizer.load(args.model_path),
        max_running=args.max_running_requests,
        version=args.weight_version,
        awaiting_weights=args.await_weights,
    )
    info = make_static_info(engine, args.model_path, slime.__version__)
    return Server(engine, info, args.seed, os.environ.get(TOKEN_VARIABLE), args.host)


async def _serve(args: argparse.Namespace) -> None:
    from aiohttp import web  # late: --help stays fast

    # Bound before the model loads, so that a port in use fails at once.
    family = family_of(args.host)
    listener = socket.create_server((args.host, args.port), family=family, backlog=_BACKLOG)
    raise_limit()
    # Bodies are not decompressed: a compressed one is refused.
    app = _make_server(args).make_app()
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, auto_decompress=False)
    await runner.setup()
    await web.SockSite(runner, listener, backlog=_TAKEN_AT_ONCE).start()
    listener.listen(_BACKLOG)
    garbage.search_new_only()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = listener.getsockname()[1]
    if args.ready_file:
        part = args.ready_file.with_suffix(".part")
        part.write_text(json.dumps({"port": port, "pid": os.getpid()}))
        part.rename(args.ready_file)
    logging.getLogger(__name__).info("serving %s on http://%s", args.model_path, with_port(args.host, port))
    await stop.wait()
    sys.stdout.flush()
    # Exit here: the end of the event loop would wait for its threads, and one may wait minutes for a process
    # group. The engine thread is inside torch, which must not be torn down while it runs.
    os._exit(0)


if __name__ == "__main__":
    main()

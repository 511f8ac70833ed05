"""`slime probe`: check that a server computes with exactly these weights, adapter and template."""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from slime.cli.bounded_numbers import between
from slime.cli.main import RUN_STOPPED, user_errors


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    with user_errors():
        for flag, folder, name in (
            ("--model", options.model, "config.json"),
            ("--adapter", options.adapter, "adapter_config.json"),
        ):
            if folder is not None and not (folder / name).is_file():
                raise ValueError(
                    f"{flag} {folder}: there is no {name}; give the folder of Hugging Face files."
                )
        if not options.url.startswith(("http://", "https://")):
            raise ValueError(f"{options.url!r} is no address: give http://HOST:PORT of the server.")
        # Imported here: torch takes seconds to load, and errors in arguments are reported without it.
        from slime.cli.probe.checks import Probe
        from slime.cli.probe.reference import Reference
        from slime.cli.probe.server import look_up
        from slime.cli.verify_model.reference import be_quiet
        from slime.utils.async_utils import run
        from slime.utils.http_utils import TOKEN_VARIABLE, HttpError, authorize

        be_quiet()
        if token := os.environ.get(TOKEN_VARIABLE):
            authorize(options.url, token)
        server = run(look_up(options.url))
        reference = Reference(options.model, options.adapter, options.device)
        probe = Probe(server, reference, options)
        try:
            diagnosis, is_right = probe.run()
        except HttpError as error:
            raise ValueError(f"the server failed: {error}") from error
    print("\n".join([*probe.rows, diagnosis]))
    return 0 if is_right else RUN_STOPPED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("slime probe", description=__doc__.partition(":")[2].strip())
    add = parser.add_argument
    add("url", metavar="URL", help="address of SGLang, vLLM, slime serve or a server like them")
    add("--model", type=Path, required=True, metavar="DIR", help="the weights that it should serve")
    add(
        "--adapter", type=Path, metavar="DIR", help="the LoRA adapter that it should apply, as peft writes it"
    )
    add(
        "--adapter-name", metavar="NAME", help="how requests name the adapter [the one that the server lists]"
    )
    other = "what it may serve by mistake, may be repeated [versions next to the given folder]"
    add("--other", type=Path, action="append", default=[], metavar="DIR", help=other)
    add("--weight-version", metavar="TEXT", help="the version that the server should report")
    tolerance = "mean difference of log-probs [three times what bfloat16 makes]"
    add("--tolerance", type=between(0, 1e6), help=tolerance)
    add("--device", default="cpu", help="where transformers computes the reference [cpu]")
    return parser

"""External engines: servers that somebody else runs. slime checks their model and uses them."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from slime.engines.engine_process import LaunchPlan
from slime.liveness import waits
from slime.utils import http_utils
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.models.model_config import read_config
from slime.wire.control import EngineControl
from slime.wire.dialects import version_tuple
from slime.wire.protocol import EngineInfo

_FLAG = "--rollout-external-engine-addrs"
_ASK_DEADLINE_S = 20.0
_LOOK_INTERVAL_S, _LOOK_TIMEOUT_S = 2.0, 2.0
# Config keys that are equal in two folders of the same model.
_CONFIG_KEYS = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True, slots=True)
class ExternalEngine:
    """An external engine that responded, and its server info."""

    url: str
    info: EngineInfo

    @property
    def worker_type(self) -> str:
        mode = self.info.raw.get("disaggregation_mode")
        return mode if mode in ("prefill", "decode") else "regular"

    @property
    def bootstrap_port(self) -> int | None:
        return self.info.raw.get("disaggregation_bootstrap_port") if self.worker_type == "prefill" else None


def read_address(address: str, flag: str = _FLAG) -> str:
    """Return the URL for `host:port` or a URL; raise a ValueError that names what is wrong with it."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        port = parts.port
        if parts.scheme not in ("http", "https") or not (parts.hostname and port) or parts.path.strip("/"):
            raise ValueError("host or port is missing, or there is more than these")
    except ValueError as error:
        raise ValueError(
            f"{flag}: {address!r} is not the address of a server ({error}); write host:port, for example "
            "10.0.0.5:30000."
        ) from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return f"{parts.scheme}://{host}:{port}"


def discover(
    addresses: Sequence[str], hf_checkpoint: str | None, flag: str = _FLAG
) -> tuple[ExternalEngine, ...]:
    """Ask each address what it serves; raise a ValueError for the first that cannot be used."""
    urls = [read_address(address, flag) for address in addresses]
    twice = sorted({url for url in urls if urls.count(url) > 1})
    if twice:
        raise ValueError(f"{flag} names {twice[0]} twice; write each engine once.")
    engines = tuple(ExternalEngine(url, _ask(url, flag)) for url in urls)
    config = read_config(hf_checkpoint) if hf_checkpoint else {}
    for engine in engines:
        _check_model(engine, config, hf_checkpoint, flag)
        info, version = engine.info, str(engine.info.raw.get("version", ""))
        if version_tuple(version) and version_tuple(version) < info.dialect.oldest_version:
            raise ValueError(
                f"{flag}: the engine at {engine.url} is SGLang {version}; at least 0.5 is needed."
            )
    kinds = {engine.info.dialect.name for engine in engines}
    if len(kinds) > 1:
        raise ValueError(
            f"{flag}: the engines speak different dialects ({', '.join(sorted(kinds))}); use one version."
        )
    return engines


def _ask(url: str, flag: str) -> EngineInfo:
    try:
        info = run(EngineControl(url, _ASK_DEADLINE_S).info())
        if not info.model_path:
            raise ValueError("it names no model")
    except (http_utils.HttpError, waits.WaitTimeout, TimeoutError) as error:
        answers = isinstance(error, http_utils.HttpError) and error.status
        what = f"{url} responds, but not as an engine" if answers else f"no engine responds at {url}"
        raise ValueError(f"{flag}: {what} ({error}); start it, or correct the address.") from None
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        raise ValueError(
            f"{flag}: {url} responds, but not with an engine's server info ({error}); correct the address."
        ) from None
    return info


def _check_model(
    engine: ExternalEngine, ours: Mapping[str, Any], hf_checkpoint: str | None, flag: str
) -> None:
    """Compare the model, as far as the engine reports it or its folder can be read from here."""
    info = engine.info
    said = {**info.raw, "vocab_size": info.vocab_size}
    theirs = {**read_config(info.model_path), **{k: v for k, v in said.items() if v is not None}}
    for key in _CONFIG_KEYS:
        if key in ours and key in theirs and ours[key] != theirs[key]:
            raise ValueError(
                f"{flag}: the engine at {engine.url} serves {info.model_path} with {key} {theirs[key]}, "
                f"but --hf-checkpoint {hf_checkpoint} has {ours[key]}; it must serve the same model."
            )


class ExternalServer:
    """An external engine as a member of the fleet. "Killed" means: not used until it responds again."""

    pid = None

    def __init__(self, engine: ExternalEngine, patience_s: float):
        name = f"external engine {urlsplit(engine.url).netloc}"
        self.plan = LaunchPlan(name, lambda *_: [], {}, Path(), patience_s, worker_type=engine.worker_type)
        self.url, self.bootstrap_port = engine.url, engine.bootstrap_port
        self._in_use = True
        self._answers, self._last_look = True, float("-inf")

    def transports(self, info: EngineInfo) -> tuple[str, ...]:
        """Return the transports without shared memory, which cannot reach other machines."""
        local = http_utils.is_loopback(urlsplit(self.url).hostname or "")
        return tuple(name for name in info.transports if local or not name.endswith("shared_memory"))

    def launch(self) -> None:
        """Do nothing: its owner starts it."""

    def wait_ready(self) -> str:
        """Wait until the engine generates a token."""
        control = EngineControl(self.url)
        try:
            waits.until(
                lambda: run(control.healthy(_ASK_DEADLINE_S)),
                f"answer of {self.plan.name}",
                self.plan.start_timeout_s,
                owner="engine fleet",
                interval_s=0.5,
            )
        except waits.WaitTimeout as error:
            raise RunStopped(f"{error} (--timeouts engine-start)") from None
        self._in_use = self._answers = True
        self._last_look = time.monotonic()
        return self.url

    def alive(self) -> bool:
        """Return whether the engine's port accepts connections; once it did not, False until `wait_ready`.

        An engine that restarts by itself has the weights of its start, so it needs a push first. Several
        threads ask: a successful check must not undo a failure that another thread has seen meanwhile.
        """
        if self._in_use and self._answers and time.monotonic() - self._last_look > _LOOK_INTERVAL_S:
            parts = urlsplit(self.url)
            try:
                socket.create_connection((parts.hostname, parts.port), _LOOK_TIMEOUT_S).close()
            except OSError:
                self._answers = False
            self._last_look = time.monotonic()
        return self._in_use and self._answers

    def signs(self) -> None:
        """Return None: its process belongs to its owner and may be on another machine."""

    def describe_end(self) -> str:
        return "was taken out of use" if not self._in_use else f"takes no connection at {self.url}"

    def kill(self) -> None:
        self._in_use = False

    def stop(self) -> None:
        """Do nothing: its owner stops it."""

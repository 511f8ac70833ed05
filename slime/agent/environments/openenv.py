"""OpenEnv: environments behind a server, by its address or by the image of a container that docker runs.

Every episode has a connection, and with it a session of its own. If an action has one field, the whole
response fills it (its last number, if the field is one); otherwise the response must hold the action as a
JSON object. The policy reads the fields of an observation: the text of a single one, or else all as JSON.
Options: see `_OPTIONS` and docs/environments.md.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import json
import logging
import re
import shutil
import threading
import urllib.request
from collections.abc import Mapping
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Item, Observation, StepResult
from slime.agent.environments.rows import SEED_KEY

logger = logging.getLogger(__name__)

# `action`, `observation`: the field that takes the response, or is read. `images`: fields with pictures.
_OPTIONS: dict[str, Any] = {"prompt": "", "system": None, "action": None, "observation": None, "images": None}
_OPTIONS |= {"reset": {}, "invalid_reward": -0.1, "deterministic": False, "env_vars": {}}
_CONNECT_S, _CAPACITY_POLL_S = 10.0, 0.5
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
_lock = threading.Lock()


def check(task: str) -> None:
    """Raise ValueError for a server that does not respond, and for an image without docker."""
    try:
        if "://" in task:
            _action_fields(task)
        elif shutil.which("docker") is None:
            raise OSError("an image needs docker; openenv:http://HOST:PORT is a server that you start")
    except (OSError, ValueError, LookupError) as error:
        raise ValueError(f"--env openenv:{task}: no OpenEnv server is there: {error}") from None


@functools.lru_cache(maxsize=64)
def _action_fields(address: str) -> dict[str, Any]:
    """Return the JSON schemas of the fields that an action of this server has."""
    with urllib.request.urlopen(f"{address.rstrip('/')}/schema", timeout=_CONNECT_S) as answer:
        fields = json.load(answer)["action"]["properties"]
    return {name: schema for name, schema in fields.items() if name != "metadata"}


@functools.lru_cache(maxsize=64)
def _container(image: str, env_vars: str) -> str:
    """Run a container until this process ends, and return its address."""
    from openenv.core.containers.runtime import LocalDockerProvider

    provider = LocalDockerProvider()
    address: str = provider.start_container(image, env_vars=json.loads(env_vars))
    atexit.register(provider.stop_container)
    provider.wait_for_ready(address)
    return address


class OpenEnv:
    """One session of a server."""

    def __init__(self, task: str, options: Mapping[str, Any]):
        from openenv.core import GenericEnvClient

        if unknown := ", ".join(set(options) - set(_OPTIONS)):
            raise ValueError(f"--env-args: OpenEnv has no option {unknown}; it has {', '.join(_OPTIONS)}")
        self._options: dict[str, Any] = {**_OPTIONS, **options}
        self.deterministic = bool(self._options["deterministic"])
        with _lock:
            variables = json.dumps(self._options["env_vars"], sort_keys=True)
            self._address = task if "://" in task else _container(task, variables)
            self._fields = _action_fields(self._address)
        self._field = self._options["action"] or (
            next(iter(self._fields)) if len(self._fields) == 1 else None
        )
        # The deadline of a call is --timeouts env.
        self._client = GenericEnvClient(self._address, _CONNECT_S, message_timeout_s=None)

    async def reset(self, item: Item) -> Observation:
        result = await self._open(item.seed)
        if result.done:
            raise EnvironmentFailure("the episode was over after its reset")
        seen, prompt = self._observed(result), self._options["prompt"]
        row = item.prompt if isinstance(item.prompt, str) and SEED_KEY not in item.metadata else ""
        if "tool_name" in self._fields and not prompt:  # actions are calls of tools
            tools = (await self._client.step({"type": "list_tools"})).observation["tools"]
            example = json.dumps({"tool_name": "...", "arguments": {}})
            prompt = "\n".join([f"Call a tool with {example}. The tools are:", *map(json.dumps, tools)])
        text = "\n".join(part for part in (prompt, row, seen.text) if part)
        return Observation(text, seen.images, system=self._options["system"])

    async def step(self, action: str) -> StepResult:
        try:
            result = await self._client.step(self._read(action))
        except (ValueError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "VALIDATION_ERROR" not in str(error):
                raise
            wanted = self._field or f"JSON object with {json.dumps(self._fields)}"
            said = f"No action was found in your response. An action is a {wanted}"
            return StepResult(said, reward=float(self._options["invalid_reward"]), tool_errors=1)
        seen = None if result.done else self._observed(result)
        return StepResult(seen, reward=float(result.reward or 0.0), done=bool(result.done))

    async def close(self) -> None:
        await self._client.close()

    async def _open(self, seed: int) -> Any:
        """Start the session; a server without a free one is asked again."""
        from websockets.exceptions import ConnectionClosedOK

        while True:
            try:
                return await self._client.reset(**{"seed": seed, **self._options["reset"]})
            except (RuntimeError, ConnectionClosedOK) as error:
                if isinstance(error, RuntimeError) and "CAPACITY_REACHED" not in str(error):
                    raise
                _warn_of_capacity(self._address)
                await self._client.disconnect()
                await asyncio.sleep(_CAPACITY_POLL_S)

    def _read(self, action: str) -> dict[str, Any]:
        """Return the action in a response; ValueError if it has none."""
        if self._field is None:
            return dict(json.loads(action[action.index("{") : action.rindex("}") + 1]))
        kind = self._fields.get(self._field, {}).get("type")
        if kind not in ("integer", "number"):
            return {self._field: action.strip()}
        number = float((_NUMBER.findall(action) or ["none"])[-1])
        return {self._field: int(number) if kind == "integer" else number}

    def _observed(self, result: Any) -> Observation:
        fields = {
            name: value for name, value in result.observation.items() if value not in (None, "", [], {})
        }
        found = [name for name, value in fields.items() if str(value)[:11] == "data:image/"]
        values = {name: fields.pop(name) for name in {*found, *(self._options["images"] or ())} & set(fields)}
        names = found if self._options["images"] is None else self._options["images"]
        images = tuple(_picture(values[name]) for name in names if name in values)
        shown = self._options["observation"] or (next(iter(fields)) if len(fields) == 1 else None)
        text = fields.get(shown, "") if shown else fields
        return Observation(text if isinstance(text, str) else json.dumps(text), images)


make = OpenEnv  # as `episode` creates the environment of any family


@functools.cache
def _warn_of_capacity(address: str) -> None:
    advice = "Episodes wait until --timeouts env: start it with a larger max_concurrent_envs."
    logger.warning("The OpenEnv server %s has no free session. %s", address, advice)


def _picture(value: Any) -> Any:
    """Return a picture: from a data URL, base64, or rows of pixels."""
    if isinstance(value, str):
        return value if value.startswith("data:") else base64.b64decode(value)
    import numpy as np
    from PIL import Image

    return Image.fromarray(np.asarray(value, dtype=np.uint8))

"""The `remote_rm` reward: a judge behind HTTP, asked with bounded retries and one total deadline."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

from slime.arguments import PluginArgs
from slime.liveness import waits
from slime.rollout.response_text import response_text
from slime.rollout.rm_hub.outcomes import RewardConfigError
from slime.utils.http_utils import HttpError, post
from slime.utils.reward_failure import RewardFailure, infra_error
from slime.utils.types import Sample

_MAX_TRIES = 10
_DEADLINE_S = 120.0
_MAX_CONNECTIONS = 64  # a batch finishes all at once; the judge should not see all of it at once

_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()


async def remote_rm(
    args: PluginArgs,
    sample: Sample,
    *,
    response: str | None = None,
    max_tries: int = _MAX_TRIES,
    deadline_s: float = _DEADLINE_S,
) -> Any | RewardFailure:
    """The JSON that `--rm-url` answers for {"prompt", "response", "label"}; `infra_error` when it does not.

    `response` replaces the sample's own text (None: the whole response, without special tokens).
    """
    if not args.rm_url:
        raise RewardConfigError("--rm-type remote_rm needs --rm-url: the address that scores a sample")
    text = response_text(args, sample) if response is None else response
    payload = {"prompt": sample.prompt, "response": text, "label": sample.label}
    try:
        async with _gate():
            waited = waits.waiting("a score", owner="rollout", deadline_s=deadline_s, target=args.rm_url)
            async with asyncio.timeout(deadline_s):
                with waited:
                    return await post(args.rm_url, payload, max_retries=max_tries - 1)
    except TimeoutError:
        return infra_error(f"--rm-url {args.rm_url} gave no score within {deadline_s:g} s")
    except HttpError as error:
        return infra_error(f"--rm-url {error}")


def _gate() -> asyncio.Semaphore:
    return _gates.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_MAX_CONNECTIONS))

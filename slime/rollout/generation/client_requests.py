"""Handles turns that an agent program requests through an endpoint; no request can stop the run."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping
from typing import Any

from slime.arguments.groups.trained_sampling import CONSTRAINTS, NEUTRAL
from slime.rollout.generation.policy_requests import PolicyRequests, is_trained, refusal_of, requests_of_call

logger = logging.getLogger(__name__)

# Sampling parameters that change the distribution which tokens are drawn from.
SHAPING = frozenset({"temperature", *NEUTRAL, *CONSTRAINTS})


class ClientRequests:
    """Requests of an agent program in one generate call; requests outside of a call are not trained on.

    It is created in the call, and used by the endpoint's thread, which has the context of another call.
    """

    def __init__(self) -> None:
        self._call: PolicyRequests | None = requests_of_call()
        self._is_trained = is_trained()

    def used(self, sampling: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return what of a client's sampling is used: all, or with `--agent-client-sampling run` only what
        leaves the distribution as it is, and a JSON schema: clients cannot read a response without it.
        """
        if self._call is None or not self._is_trained or self._call.args.agent_client_sampling != "run":
            return sampling
        return {name: value for name, value in sampling.items() if name not in SHAPING - {"json_schema"}}

    def untrained(self, asked: Mapping[str, Any], params: Mapping[str, Any]) -> str | None:
        """Name the sampling that a client asked for and that training cannot use; None: it can use all.

        `params` are those of the whole request. What the generate function chose is not the client's doing.
        """
        if self._call is None or not self._is_trained:
            return None
        args = self._call.args
        if args.allow_sampling_mismatch or args.debug_rollout_only:
            return None
        rest = {name: value for name, value in params.items() if name not in SHAPING}
        for name in sorted(asked.keys() & SHAPING):
            differs = name == "temperature" and asked[name] != args.rollout_temperature
            if differs or refusal_of(args, {**rest, name: asked[name]}) is not None:
                _warn(name)
                return name
        return None

    def sending(self, *, trained: bool) -> contextlib.AbstractContextManager[None]:
        """Send a request for the call that this was made in."""
        if self._call is None:
            return contextlib.nullcontext()
        return self._call.elsewhere(trained=trained and self._is_trained)


@functools.cache  # once for each parameter: clients may send thousands of values
def _warn(name: str) -> None:
    logger.warning(
        "A client of the agent endpoint asks for another %s than the run samples with. Such turns are "
        "generated as asked and not trained; rollout/agent/untrained_turns counts them. To train on them, "
        "use the run's own sampling (--agent-client-sampling run) or accept the mismatch "
        "(--allow-sampling-mismatch).",
        name,
    )

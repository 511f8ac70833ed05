"""The tasksets of the package verifiers, unchanged: `--env verifiers:gsm8k-v1`.

Such an environment runs its own agent, which calls a model through OpenAI's or Anthropic's API. It gets the
adapter's address with the session's id, so every response is recorded as the engine sampled it. The reward is
taken from the agent's trace. Every eighth task of a taskset is held out for evaluation.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

from slime.agent.adapters import adapter_of
from slime.agent.environments.protocol import EnvironmentFailure, Item
from slime.agent.session import Budget, Session, seed_of_episode
from slime.arguments import PluginArgs
from slime.catalog.deadlines import timeout_s
from slime.utils.types import Sample

MAX_TASKS = 100_000  # read from a taskset without an end
HELD_OUT_EVERY = 8
_NO_KEY = "SLIME_NO_API_KEY"  # a variable that is never set: the address is the key

_lock = threading.Lock()
_served: dict[tuple[str, str, asyncio.AbstractEventLoop], Served] = {}


def check(task: str) -> None:
    """Raise ValueError for a taskset that cannot be imported."""
    from verifiers.v1.utils.loaders import taskset_class

    try:
        taskset_class(task)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"--env verifiers:{task}: {error}") from None


def config_of(task: str, options: Mapping[str, Any]) -> Any:
    """Return the config of the environment: options of --env-args over our defaults.

    A taskset without an agent gets the plain chat loop, not a shell on this machine.
    """
    from verifiers.v1.configs.env import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.envs.single_agent import SingleAgentEnvConfig
    from verifiers.v1.utils.generic import concrete_type
    from verifiers.v1.utils.loaders import default_harness_id, environment_class

    own = default_harness_id(task)
    agent: dict[str, Any] = {
        "runtime": {"type": "subprocess"},
        "harness": {"id": "null" if own == "bash" else own},
    }
    given = json.loads(json.dumps(dict(options)))  # plain dicts
    kind = concrete_type(environment_class(task, given.get("id", "")), EnvConfig, origin=Env)
    if kind is not SingleAgentEnvConfig:
        raise ValueError(f"--env verifiers:{task}: environments with several agents are not supported.")
    taskset = {**given.get("taskset", {}), "id": task}
    agent |= given.get("agent", {})
    return SingleAgentEnvConfig.model_validate({**given, "taskset": taskset, "agent": agent})


class Served:
    """One environment; its servers run while its episodes are played."""

    def __init__(self, task: str, options: Mapping[str, Any]) -> None:
        from verifiers.v1.utils.loaders import load_environment

        self.env = load_environment(config_of(task, options))
        tasks = list(itertools.islice(self.env.taskset, MAX_TASKS))
        held_out = tasks[::HELD_OUT_EVERY]
        self.tasks = {  # by whether they are held out
            True: held_out,
            False: [one for place, one in enumerate(tasks) if place % HELD_OUT_EVERY] or tasks,
        }
        if not held_out:
            raise EnvironmentFailure(f"environment verifiers:{task}: the taskset has no tasks")
        self._players = 0
        self._keeper: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._over = asyncio.Event()

    @contextlib.asynccontextmanager
    async def playing(self) -> AsyncIterator[None]:
        self._players += 1
        if self._keeper is None:
            self._over = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.ensure_future(self._keep(self._ready, self._over))
        try:
            assert self._ready is not None, "set with the keeper"
            await asyncio.shield(self._ready)
            yield
        finally:
            self._players -= 1
            if not self._players:
                self._over.set()
                self._keeper = None

    async def _keep(self, ready: asyncio.Future[None], over: asyncio.Event) -> None:
        """Run the servers: one task must enter and leave their context."""
        try:
            async with self.env.serving():
                ready.set_result(None)
                await over.wait()
        except (Exception, SystemExit) as error:  # SystemExit: a login that is missing
            if not ready.done():
                ready.set_exception(EnvironmentFailure(f"its servers do not start: {error}"))


def _environment(task: str, options: Mapping[str, Any], loop: asyncio.AbstractEventLoop) -> Served:
    """Return this process's environment; it is called in a thread, because reading a taskset takes time."""
    key = (task, json.dumps(dict(options), sort_keys=True), loop)
    with _lock:
        if key not in _served:
            _served[key] = Served(task, options)
        return _served[key]


async def play(
    args: PluginArgs,
    sample: Sample,
    params: Mapping[str, Any],
    *,
    task: str,
    options: Mapping[str, Any],
    item: Item,
) -> list[Sample]:
    """Play one episode and return its samples; EnvironmentFailure if it has no score."""
    served = await asyncio.to_thread(_environment, task, options, asyncio.get_running_loop())
    adapter = await adapter_of(args)
    sid = sample.session_id
    assert sid is not None, "samples of a rollout have a session"
    own = Budget.of_run(args, params)
    of_turn = args.turn_max_response_len or own.max_new_tokens
    budget = Budget(args.max_turns, own.max_context_tokens, of_turn, own.max_new_tokens)
    session = adapter.open_session(sid, params, budget=budget, seed=seed_of_episode(args, sample))
    try:
        async with served.playing(), asyncio.timeout(timeout_s(args, "episode") or None):
            tasks = served.tasks[item.held_out]
            context = _context(f"{adapter.url}/sessions/{sid}")
            episode = await served.env.run_episode(tasks[item.seed // 2 % len(tasks)], context)
        reward = _score(episode, session)
        return await adapter.finish_session(sid, base_sample=sample, reward=reward, args=args)
    except TimeoutError:
        raise EnvironmentFailure(
            f"the episode took longer than --timeouts episode={timeout_s(args, 'episode'):g}"
        ) from None
    finally:
        if adapter.session(sid) is session:
            await asyncio.shield(adapter.shutdown_session(sid))
            adapter.drop_session(sid)


def _context(address: str) -> Any:
    import verifiers.v1 as vf

    # No sampling parameters are set here, so that those of the session apply.
    return vf.ModelContext(
        model="policy", client=vf.EvalClientConfig(base_url=f"{address}/v1", api_key_var=_NO_KEY)
    )


def _score(episode: Any, session: Session) -> float:
    """Return the reward of the trace. An episode that a budget ended is scored as it is."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors and not session.refused:
        last = errors[-1]
        raise EnvironmentFailure(f"{last.type}: {last.message[:300]}")
    if not episode.traces:
        raise EnvironmentFailure("the episode has no trace")
    return float(episode.traces[0].reward)

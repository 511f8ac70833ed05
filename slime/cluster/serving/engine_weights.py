"""Updates the policy's engines to a weight version, and offloads and restores their memory.

For a new version, engines pause, load the weights, are verified and resume. `receive` takes a bundle that
engines fetch. A live push is `begin_live`, the transfer from the trainer, `finish_live`, and then `receive`
with the files for engines that failed; without files where none did. An engine that restarts later then waits
until the trainer has written them (`wants_files`, `add_files`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from slime.arguments import Args
from slime.catalog.deadlines import timeout_s
from slime.catalog.transports import TRANSPORTS
from slime.cluster.serving.loaded_weights import LifeKey, LoadedWeights
from slime.engines.fleet import EngineFleet
from slime.utils.async_utils import run
from slime.utils.errors import RunStopped
from slime.utils.http_utils import HttpError
from slime.weight_sync.base import LiveReport, Target, WeightBundle, check_receipt
from slime.weight_sync.transports import transport_of
from slime.weight_sync.verify import differing
from slime.wire.control import EngineControl, NoChecksums, PauseMode, Tag
from slime.wire.protocol import ADAPTER_NAME, EngineInfo

R = TypeVar("R")
logger = logging.getLogger(__name__)

# Aborted requests leave the engine only a moment later.
_FLUSH_ATTEMPTS, _FLUSH_PAUSE_S = 40, 0.25

_SHOWN_ANSWER = 300  # characters

Act = Callable[[str, EngineInfo], Coroutine[Any, Any, None]]  # on the engine with that address


@dataclass(frozen=True, slots=True)
class Member:
    """Identity and devices of one engine process."""

    info: EngineInfo
    life: int
    gpu_ids: tuple[int, ...]


class EngineWeights:
    """Weights and memory of the policy's engines. `gpu_ids`: trainer ranks on each engine's devices.

    There is one push at a time, and no engine joins during a push.
    """

    def __init__(self, args: Args, shm_prefix: str, gpu_ids: tuple[tuple[int, ...], ...], fleet: EngineFleet):
        self._args, self._shm_prefix, self._fleet = args, shm_prefix, fleet
        self._gpu_ids = dict(zip(fleet.servers, gpu_ids, strict=False))  # engines that join later have none
        self._members: dict[str, Member] = {}
        self._released: frozenset[Tag] = frozenset()  # parts of their memory that engines hold no more
        self._live: contextlib.ExitStack | None = None  # keeps the membership as it is in a live push
        self._current: set[str] = set()  # engines that a live push has brought to its version
        self._num_pushes = 0
        self._loaded = LoadedWeights()
        self.bundle: WeightBundle | None = None  # what an engine that joins now must take
        self._awaits_files = False  # a restarted engine cannot join before the trainer writes its weights
        fleet.keep_current(lambda: self.version, self.bring_up_to_date, self._has_files)

    @property
    def version(self) -> str | None:
        """Return the weight version of the last push to the engines; None before the first push."""
        return self.bundle.version if self.bundle is not None else None

    def info(self, url: str) -> EngineInfo:
        """Return what an engine reports of itself; each engine process is asked once."""
        server = next(server for server in self._fleet.servers if server.url == url)
        life = server.pid or 0
        member = self._members.get(url)
        if member is None or member.life != life:
            member = Member(run(EngineControl(url).info()), life, self._gpu_ids.get(server, ()))
            self._members[url] = member
        return member.info

    def _key(self, url: str) -> LifeKey:
        return url, self._members[url].life if url in self._members else 0

    @property
    def _alive(self) -> list[str]:
        return [url for url in self._fleet.urls if self._fleet.is_alive(url)]

    def _control(self, url: str) -> EngineControl:
        return EngineControl(url, timeout_s(self._args, "update-weight"))

    # -- a bundle

    def receive(self, bundle: WeightBundle) -> dict[str, float]:
        """Bring every engine to the bundle's version; after a live push, the engines that it did not reach.

        One that fails is evicted; the fleet starts it again and brings it to this bundle before it serves. A
        cause that persists therefore ends the run as engines that keep dying.
        """
        started = time.monotonic()
        with self._freeze():
            self.bundle, self._awaits_files = bundle, False  # whoever joins from now on gets this version
            others = [url for url in self._alive if url not in self._current]
            failures = self._on_each(others, self._take(bundle))
            checked = time.monotonic()
            if self._args.check_weight_update_equal:  # others were compared when they took the bundle
                failures += self._on_each(sorted(self._current), self._compare_paused(bundle))
            failures += self._check_deeply(bundle, self._alive)
            self._loaded.forget()
            self._current = set()
        self._num_pushes += 1
        return {
            "perf/update_weights_engine_time": checked - started,
            "perf/update_weights_check_time": time.monotonic() - checked,
            "perf/engines_evicted": failures,
        }

    def _has_files(self) -> bool:
        """Return whether a restarted engine can load the current version; if not, ask for its files."""
        self._awaits_files = self.bundle is not None and self.bundle.payload is None
        return not self._awaits_files

    def wants_files(self, *, changed: bool) -> bool:
        """Return whether an engine waits for files of the current version.

        `changed`: the trainer has other weights by now. Engines that serve keep their version until the next
        push, and one that waits gets the next version. With no engine left there would be no next push.
        """
        return self._awaits_files and not (changed and self._alive)

    def add_files(self, bundle: WeightBundle) -> None:
        """Let waiting engines load these files: of the current version, or of a new one that none serves."""
        self.bundle, self._awaits_files = bundle, False

    def bring_up_to_date(self, url: str) -> None:
        """Give a restarted engine the current weights, and release the memory that the others released."""
        if self.bundle is not None:
            run(self._take(self.bundle)(url, self.info(url)))
        if self._released:
            run(EngineControl(url).release(self._released))

    def _take(self, bundle: WeightBundle) -> Act:
        async def take(url: str, info: EngineInfo) -> None:
            control, transport = self._control(url), transport_of(bundle.transport)
            await transport.prepare(bundle, control, info)
            await self._pause_for(bundle, url, info)
            await self._loaded.overwrite(self._key(url), control)
            check_receipt(bundle, await transport.deliver(bundle, control, info), url)
            if self._args.check_weight_update_equal:
                await self._compare(bundle, url, info)
            await control.resume()

        return take

    async def _pause_for(self, bundle: WeightBundle, url: str, info: EngineInfo) -> None:
        keep = TRANSPORTS[bundle.transport].keeps_requests
        await self._pause(self._control(url), info, keep=keep)

    async def _pause(self, control: EngineControl, info: EngineInfo, *, keep: bool = True) -> None:
        """Pause an engine and empty its prefix cache, which holds prefixes of the old weights."""
        await control.pause(pause_mode(self._args.pause_generation_mode, info, keep=keep))
        for attempt in range(1, _FLUSH_ATTEMPTS + 1):
            try:
                return await control.flush()
            except HttpError as error:
                if error.status != 400 or attempt == _FLUSH_ATTEMPTS:
                    raise
                await asyncio.sleep(_FLUSH_PAUSE_S)

    async def _compare(self, bundle: WeightBundle, url: str, info: EngineInfo) -> None:
        different = await self._differing(bundle, url, info)
        if different:
            raise RuntimeError(
                f"engine {url} differs from the trainer in {len(different)} tensors: {different[:8]}"
            )

    async def _differing(self, bundle: WeightBundle, url: str, info: EngineInfo) -> list[str]:
        compare = transport_of(bundle.transport).compare
        return await compare(bundle, self._control(url), info, self._shm_prefix)

    # -- a live push

    def begin_live(self) -> tuple[Target, ...]:
        """Pause the engines and open an update on each; return the ones that wait for the trainer."""
        self._live = self._freeze()

        async def begin(url: str, info: EngineInfo) -> None:
            control = self._control(url)
            await self._pause(control, info)
            await self._loaded.overwrite(self._key(url), control)
            if info.dialect.has_begin_end:
                await control.begin_update()

        self._on_each(self._alive, begin)
        members = {url: self._members[url] for url in self._alive}
        return tuple(
            Target(url, m.life, m.info.num_ranks, m.gpu_ids, m.info.dialect.parallel_updates)
            for url, m in members.items()
        )

    def abandon_live(self, targets: tuple[Target, ...]) -> None:
        """End a live push whose trainer was lost: engines stay paused until the next push."""

        async def end(url: str, info: EngineInfo) -> None:
            if info.dialect.has_begin_end:
                await self._control(url).end_update()

        with self._freeze():
            self._on_each([target.url for target in targets], end)

    def finish_live(self, version: str, targets: tuple[Target, ...], report: LiveReport) -> dict[str, float]:
        """Let engines that were reached continue; the others stay paused until `receive` brings the copy."""
        started = time.monotonic()

        async def end(url: str, info: EngineInfo) -> None:
            control = self._control(url)
            if info.dialect.has_begin_end:
                await control.end_update()
            if url in report.failures:
                return
            held = await control.version()
            if held != version:
                raise RuntimeError(f"engine {url} reports weights {held} after {version} was sent")
            await control.resume()

        urls = [target.url for target in targets]
        failures = self._on_each(urls, end)
        self._current = {url for url in urls if url not in report.failures and self._fleet.is_alive(url)}
        for url, why in report.failures.items():
            logger.warning("Engine %s did not receive weights %s: %s", url, version, why)
        return {
            "perf/update_weights_engine_time": time.monotonic() - started,
            "perf/engines_missed": len(report.failures),
            "perf/engines_evicted": failures,
        }

    def needs_files(self) -> bool:
        """Return whether `receive` needs files after `finish_live`: for missed engines, or to compare."""
        unproven = [
            url
            for url in (self._alive if self._num_pushes == 0 else ())
            if not (
                self._members[url].info.dialect.compares_manifests or self._loaded.is_noted(self._key(url))
            )
        ]
        return bool(unproven or set(self._alive) - self._current) or self._args.check_weight_update_equal

    # -- memory

    def release(self, tags: frozenset[Tag]) -> None:
        self._change_memory(lambda control: control.release(tags), self._released | tags)

    def restore(self, tags: frozenset[Tag]) -> None:
        self._change_memory(lambda control: control.restore(tags), self._released - tags)

    def _change_memory(
        self, act: Callable[[EngineControl], Coroutine[Any, Any, None]], released: frozenset[Tag]
    ) -> None:
        async def on_all(urls: list[str]) -> None:
            await asyncio.gather(*(act(EngineControl(url)) for url in urls))

        with self._fleet.frozen() as urls:
            run(on_all(urls))
            self._released, self._fleet.asleep = released, bool(released)

    # -- verification

    def note_loaded(self) -> None:
        """Note checksums before the first push, if the trainer starts with the model of the engines.

        The first push is then verified by their checksums, see `loaded_weights`. An engine that reports none,
        or must not be overwritten, is verified by a load from files.
        """

        async def note(url: str, info: EngineInfo) -> None:
            if not info.can_be_overwritten:
                return
            try:
                await self._loaded.note(self._key(url), self._control(url))
            except (HttpError, NoChecksums) as error:
                logger.info("The first push to engine %s will be compared with files: %s", url, error)

        with self._fleet.frozen() as urls:
            if self.bundle is None:
                self._on_each(urls, note)

    def _check_deeply(self, bundle: WeightBundle, urls: list[str]) -> int:
        """Compare the engines' checksums, after the first push also with files; evict engines that differ."""
        first, interval = self._num_pushes == 0, self._args.weight_checksum_interval
        if not urls or not (first or (interval and self._num_pushes % interval == 0)):
            return 0
        sums = run(_gather([self._control(url).checksums() for url in urls]))
        known = {url: held for url, held in zip(urls, sums, strict=True) if isinstance(held, Mapping)}
        apart = {url: self._loaded.differing_tensors(self._key(url), known.get(url, {})) for url in urls}
        if not known:
            logger.warning("The weights of the engines are not compared with each other: %s", sums[0])
            return self._evict_overwritten(apart)
        proven = [url for url in known if apart[url] == []]
        reference = next(iter([*proven, *known]))
        failures = 0
        for url, held in known.items():
            if names := differing(known[reference], held):
                apart_from = f"engines {reference} and {url} hold different weights in {len(names)} tensors"
                self._fleet.evict(url, RuntimeError(f"{apart_from}: {names[:8]}"))
                failures += 1
        comparable = bundle.payload is not None and not self.info(reference).dialect.compares_manifests
        if first and not proven and comparable:
            failures += self._on_each([reference], self._compare_paused(bundle))
        return failures + self._evict_overwritten(apart)

    def _evict_overwritten(self, apart: Mapping[str, list[str] | None]) -> int:
        """Evict engines that may still hold noise: the push did not restore what was overwritten."""
        left = {url: names for url, names in apart.items() if names and self._fleet.is_alive(url)}
        for url, names in left.items():
            why = f"engine {url} was overwritten before the first push, which left {len(names)} tensors"
            self._fleet.evict(url, RuntimeError(f"{why} otherwise than it had loaded them: {names[:8]}"))
        return len(left)

    def score(self, probe: list[list[int]]) -> dict[str, list[list[float]] | str]:
        """Return for each engine the log-probs of each text, or why it does not report them."""
        extra = {"lora_path": ADAPTER_NAME} if self._args.lora_sync == "adapter" else {}

        async def score(url: str) -> list[list[float]]:
            control = self._control(url)
            return list(await asyncio.gather(*(control.score(ids, extra) for ids in probe)))

        with self._fleet.frozen() as urls:
            names = {server.url: server.plan for server in self._fleet.servers}
            asked = [url for url in urls if names[url].worker_type == "regular"]
            answers = run(_gather([score(url) for url in asked]))
        return {
            names[url].name: _shown(answer) if isinstance(answer, BaseException) else answer
            for url, answer in zip(asked, answers, strict=True)
        }

    def tensors_apart(self, name: str) -> list[str] | str:
        """Return the tensors of an engine that differ from the last push; a text: why that is not known."""
        bundle = self.bundle
        url = next((server.url for server in self._fleet.servers if server.plan.name == name), None)
        if bundle is None or url is None or not self._fleet.is_alive(url):
            return "it is gone, or nothing was sent to it"
        if bundle.payload is None:
            return "no files of this version were written (--check-weight-update-equal compares every push)"

        async def compare() -> list[str]:
            info = self.info(url)
            await self._pause_for(bundle, url, info)
            try:
                return await self._differing(bundle, url, info)
            finally:
                await self._control(url).resume()

        with self._fleet.frozen():
            [found] = run(_gather([compare()]))
        return found if not isinstance(found, BaseException) else _shown(found)

    def _compare_paused(self, bundle: WeightBundle) -> Act:
        async def compare(url: str, info: EngineInfo) -> None:
            await self._pause_for(bundle, url, info)
            await self._compare(bundle, url, info)
            await self._control(url).resume()

        return compare

    # -- all engines

    def _freeze(self) -> contextlib.ExitStack:
        """Let no engine join until the context is closed; a live push has begun so already."""
        live, self._live = self._live, None
        if live is None:
            live = contextlib.ExitStack()
            live.enter_context(self._fleet.frozen())
        return live

    def _on_each(self, urls: list[str], act: Act) -> int:
        """Act on all engines at once, evict engines that fail, and return how many failed."""
        infos: dict[str, EngineInfo] = {}
        failures: dict[str, Exception] = {}
        for url in urls:
            try:
                infos[url] = self.info(url)
            except (HttpError, TimeoutError) as error:
                failures[url] = error
        outcomes = run(_gather([act(url, info) for url, info in infos.items()]))
        failures |= {u: o for u, o in zip(infos, outcomes, strict=True) if isinstance(o, Exception)}
        for url, cause in failures.items():
            if isinstance(cause, RunStopped):
                raise cause  # not the engine's fault, and a new one would meet it too
            self._fleet.evict(url, cause)
        return len(failures)


def pause_mode(asked: str, info: EngineInfo, *, keep: bool = True) -> PauseMode:
    """Choose what happens to the requests of an engine in a push: as asked, where it can be.

    An engine that reports which tokens came from which version keeps its requests. From any other, and where
    the transport does not let it `keep` them, they are aborted and sent again, so that each part has one
    version.
    """
    if not (info.dialect.has_spans and keep) or asked == "abort":
        return "abort"
    return "in_place" if asked == "in_place" else "retract"


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_SHOWN_ANSWER]


async def _gather(tasks: Iterable[Coroutine[Any, Any, R]]) -> list[R | BaseException]:
    """Return every result, or the exception that was raised instead."""
    return await asyncio.gather(*tasks, return_exceptions=True)

"""The HTTP server of the embedded engine: SGLang's endpoints, and one for weights in shared memory."""

import asyncio
import functools
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from aiohttp import web

from slime.catalog.engines import ENGINES
from slime.engines.embedded.adapter import AdaptedWeights, scale_of
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.engine_thread import EngineLoop
from slime.engines.embedded.generate_json import (
    BadRequest,
    RequestFailed,
    RequestLimits,
    RequestReader,
    answer_json,
    raise_failure,
    text_of,
)
from slime.engines.embedded.openai_api import OpenAIApi
from slime.engines.embedded.request_images import ImageReader
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.update_groups import UpdateGroups, read_bucket
from slime.engines.embedded.weight_delta import DeltaUpdate
from slime.engines.embedded.weight_update import (
    BadWeights,
    DiskSource,
    GroupSource,
    SharedMemorySource,
    Source,
    WeightStore,
)
from slime.utils.browser_guard import browser_guard, names_of_this_machine, token_guard
from slime.utils.media.image_tokens import encoder_of
from slime.utils.processing_utils import load_processor
from slime.wire.control import PAUSE_MODES, TAGS
from slime.wire.manifest import WeightManifest
from slime.wire.openai_shapes import error_json, model_list
from slime.wire.protocol import shown

_DIALECT = ENGINES["embedded"].dialect

_MAX_BODY_BYTES = 32 << 20  # JSON is parsed in one piece, which blocks all other requests: a second at most
_BODY_DEADLINE_S = 120.0

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Generate = Callable[[web.Request, dict[str, Any]], Awaitable[web.StreamResponse]]
Control = Callable[[dict[str, Any]], Awaitable[Any]]  # body of a request -> body of the response


class Server:
    """Handlers of HTTP requests; created on the asyncio thread, which also starts the engine.

    Each handler passes its work to the engine's thread; slow preparation (text, weights) has threads of its
    own.
    """

    def __init__(self, engine: Engine, static_info: dict[str, Any], seed: int, token: str | None, host: str):
        self.engine, self._token, self._host = engine, token, host
        self.static_info, self.model_path = static_info, static_info["model_path"]
        runner = engine.runner
        eos = runner.eos_token_ids
        if engine.detokenizer.eos_token_id is not None:
            eos |= {engine.detokenizer.eos_token_id}
        limits = RequestLimits(
            runner.vocab_size, runner.context_len, engine.max_tokens, eos, runner.experts is not None
        )
        processor = load_processor(self.model_path) if runner.vision is not None else None
        images = None if processor is None else ImageReader(encoder_of(processor), runner.model.config)
        self.reader = RequestReader(limits, engine.detokenizer, seed, images)
        self.groups = UpdateGroups(runner.device)
        self.loop = EngineLoop(engine)
        # Separate threads: a wait for weights occupies one for long, and requests must not wait for it.
        self._reading = ThreadPoolExecutor(1, "requests")

    def make_app(self) -> web.Application:
        known = names_of_this_machine([self._host]) if self._token is None else None
        guards = [browser_guard(known=known), _errors_as_json]
        if self._token is not None:
            guards.insert(1, token_guard(self._token, but="/health"))
        app = web.Application(client_max_size=_MAX_BODY_BYTES, middlewares=guards)
        openai = OpenAIApi(self.loop, self.reader, self._reading, self.model_path, self._accept)
        questions: dict[str, Control] = {
            "/health": self.health,
            "/health_generate": self.health_generate,
            "/flush_cache": self.flush_cache,
            "/get_server_info": self.server_info,
            "/server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/get_weight_version": self.model_info,
            "/v1/loads": self.loads,
            "/v1/models": self.models,
        }
        generates: dict[str, Generate] = {
            "/generate": self.generate,
            "/v1/chat/completions": openai.chat,
            "/v1/completions": openai.completions,
        }
        controls: dict[str, Control] = {
            "/flush_cache": self.flush_cache,
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weights_from_shared_memory": self.update_weights_from_shared_memory,
            "/update_weights_from_delta": self.update_weights_from_delta,
            "/init_weights_update_group": self.join_group,
            "/destroy_weights_update_group": self.leave_group,
            "/update_weights_from_distributed": self.update_weights_from_group,
            "/load_lora_adapter_from_shared_memory": self.load_adapter,
            "/update_weight_version": self.update_weight_version,
            "/weights_checker": self.weights_checker,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        for path, question in questions.items():
            app.router.add_get(path, _as_handler(question))
        for path, generate in generates.items():
            app.router.add_post(path, _reading(generate))
        for path, control in controls.items():
            app.router.add_post(path, _as_handler(control))
        return app

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        sequences, is_list = await self._accept(body)
        if sequences[0].stream:
            return await self._stream(request, sequences, is_list)
        await self.loop.finish(sequences)
        raise_failure(sequences)
        answers = [answer_json(sequence, self.engine.detokenizer) for sequence in sequences]
        return web.json_response(answers if is_list else answers[0])

    async def _accept(self, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """Return the sequences of a /generate body; RequestFailed if none can be served now."""
        if self.engine.awaiting_weights:
            raise RequestFailed(503, "the engine waits for its first weights")
        if self.engine.released:
            released = sorted(self.engine.released)
            raise RequestFailed(503, f"memory is released ({released}): call /resume_memory_occupation")
        adapter, held = body.pop("lora_path", None), self.engine.adapters.name
        if adapter is not None and adapter != held:
            raise BadRequest(f"lora_path is {shown(adapter)}: this engine has {held or 'no adapters'}")
        return await asyncio.get_running_loop().run_in_executor(self._reading, self.reader.read, body)

    async def _stream(
        self, request: web.Request, sequences: list[Sequence], is_list: bool
    ) -> web.StreamResponse:
        """Yield events of all sequences of a request as they come; those of a list have an `index`. A failed
        member of a list has no last event: a request for it alone returns the error.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        waiting = {sequence: {"index": place} if is_list else {} for place, sequence in enumerate(sequences)}
        with self.loop.submit(sequences) as listener:
            while waiting:
                chunks = []
                for sequence in await listener.wait():
                    if sequence.failed:
                        waiting.pop(sequence, None)
                    elif sequence in waiting:
                        chunk = answer_json(sequence, self.engine.detokenizer) | waiting[sequence]
                        chunks.append(f"data: {json.dumps(chunk)}\n\n")
                        if chunk["meta_info"]["finish_reason"] is not None:
                            del waiting[sequence]
                if not chunks and waiting:
                    continue
                if not response.prepared:
                    if not chunks:
                        raise_failure(sequences)
                    await response.prepare(request)
                elif not chunks and not is_list:  # events that were sent cannot be revoked
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                data = "".join(chunks).encode()
                await (response.write(data) if waiting else response.write_eof(data + b"data: [DONE]\n\n"))
        return response

    async def abort_request(self, body: dict[str, Any]) -> web.Response:
        rid, prefix = (None, False) if body.get("abort_all") else (body.get("rid"), body.get("prefix", False))
        is_rid = isinstance(rid, str) and isinstance(prefix, bool) and (rid or not prefix)
        if not is_rid and not body.get("abort_all"):
            raise BadRequest('give "rid": string, not empty with "prefix": true, or "abort_all": true')
        await self.loop.call_and_notify(functools.partial(self.engine.abort, prefix=prefix), rid)
        return web.Response()

    async def pause_generation(self, body: dict[str, Any]) -> Any:
        mode = body.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode is {shown(mode)}: expected one of {PAUSE_MODES}")
        await self.loop.call_and_notify(self.engine.pause, mode)
        return {"status": "ok"}

    async def continue_generation(self, body: dict[str, Any]) -> Any:
        await self.loop.call(self.engine.resume)
        return {"status": "ok"}

    # -- state -----------------------------------------------------------------------------------------------

    async def health(self, body: dict[str, Any]) -> web.Response:
        return web.Response(status=200 if self.loop.alive else 503)

    async def health_generate(self, body: dict[str, Any]) -> web.Response:
        """Generate one token with the whole engine.

        A busy engine shows it by its next forward pass, without queueing behind thousands of requests; one
        that may not generate now (paused, released, without weights) only has to reply between steps.
        """
        engine = self.engine
        if engine.paused or engine.released or engine.awaiting_weights or engine.is_mixed:
            await self.loop.call(lambda: None)
        elif engine.can_step:
            passes = engine.runner.num_forward_passes
            while engine.can_step and engine.runner.num_forward_passes == passes:
                await asyncio.sleep(0.01)
        else:
            probe, _ = self.reader.read({"input_ids": [0], "sampling_params": {"max_new_tokens": 1}})
            await self.loop.finish(probe)
            if probe[0].failed:
                return _error(503, str(probe[0].finish))
        return web.Response()

    async def server_info(self, body: dict[str, Any]) -> Any:
        state = await self.loop.call(self.engine.state)
        return {**self.static_info, "model_path": self.model_path, **state}

    async def model_info(self, body: dict[str, Any]) -> Any:
        return {
            "model_path": self.model_path,
            "weight_version": self.engine.version,
            "is_generation": True,
        }

    async def models(self, body: dict[str, Any]) -> Any:
        names = [self.model_path, *([self.engine.adapters.name] if self.engine.adapters.name else ())]
        return model_list(names, root=self.model_path, max_model_len=self.engine.runner.context_len)

    async def loads(self, body: dict[str, Any]) -> Any:
        state = await self.loop.call(self.engine.state)
        running, waiting = state["num_running_reqs"], state["num_waiting_reqs"]
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "queues": {"waiting": waiting, "retracted": state["num_retracted_reqs"]},
        }
        return {"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]}

    async def flush_cache(self, body: dict[str, Any]) -> web.Response:
        await self.loop.call(self.engine.allocator.flush)
        return web.Response(text="Cache flushed.\n")

    # -- weights ---------------------------------------------------------------------------------------------

    async def _update(
        self,
        open_source: Callable[[], Source],
        held: WeightStore | AdaptedWeights,
        apply: Callable[[Source], tuple[int, int]],
    ) -> tuple[int, int]:
        """Open and verify while requests generate; only the copy pauses them. Returns (tensors, bytes)."""

        def checked() -> Source:
            source = open_source()
            try:
                held.check(source)
                held.check_finite(source)
            except BaseException:
                source.close()
                raise
            return source

        source = await asyncio.to_thread(checked)
        try:
            return await self.loop.call(apply, source)
        finally:
            source.close()

    async def update_weights_from_shared_memory(self, body: dict[str, Any]) -> Any:
        manifest, engine = await _read_manifest(body), self.engine
        count, _ = await self._update(
            lambda: SharedMemorySource(manifest),
            engine.weights,
            lambda source: engine.update_weights(source, manifest.version),
        )
        return _updated(manifest.version, count, manifest.nbytes, manifest.checksum)

    async def load_adapter(self, body: dict[str, Any]) -> Any:
        """Load low-rank adapters from a manifest; all requests use them, whether or not they name them."""
        manifest, name = await _read_manifest(body.get("manifest")), text_of(body, "lora_name")
        scale, engine = scale_of(body.get("config_dict")), self.engine
        count, _ = await self._update(
            lambda: SharedMemorySource(manifest),
            engine.adapters,
            lambda source: engine.update_adapter(source, scale, name, manifest.version),
        )
        return _updated(manifest.version, count, manifest.nbytes, manifest.checksum)

    async def update_weights_from_disk(self, body: dict[str, Any]) -> Any:
        engine, path = self.engine, text_of(body, "model_path")
        version = str(body.get("weight_version") or engine.version)
        count, nbytes = await self._update(
            lambda: DiskSource(path), engine.weights, lambda source: engine.update_weights(source, version)
        )
        self.model_path = path
        return _updated(version, count, nbytes, None)

    async def update_weights_from_delta(self, body: dict[str, Any]) -> Any:
        """Read a published delta while requests generate; only its application pauses them."""
        folder, base, version = (text_of(body, name) for name in ("folder", "base_version", "weight_version"))
        delta = await asyncio.to_thread(DeltaUpdate, Path(folder), base, version)
        count, nbytes = await self.loop.call(self.engine.update_by_delta, delta)
        return _updated(version, count, nbytes, None)

    async def join_group(self, body: dict[str, Any]) -> Any:
        return {"success": True, "message": await asyncio.to_thread(self.groups.join, body)}

    async def leave_group(self, body: dict[str, Any]) -> Any:
        name = text_of(body, "group_name")
        await asyncio.to_thread(self.groups.leave, name)
        return {"success": True, "message": f"{name} is left"}

    async def update_weights_from_group(self, body: dict[str, Any]) -> Any:
        """Receive one bucket while requests generate; its copy pauses them until the last bucket."""
        version = str(body.get("weight_version") or self.engine.version)
        group, bucket = text_of(body, "group_name"), read_bucket(body)
        tensors = await asyncio.to_thread(self.groups.receive, group, bucket)
        count, nbytes = await self.loop.call(self.engine.update_part, GroupSource(tensors), version)
        return _updated(version, count, nbytes, None)

    async def update_weight_version(self, body: dict[str, Any]) -> Any:
        version = text_of(body, "new_version")
        if body.get("abort_all_requests"):
            await self.loop.call_and_notify(self.engine.abort, None)
        await self.loop.call(self.engine.set_version, version)
        return {"success": True, "message": f"weight version is now {version}"}

    async def weights_checker(self, body: dict[str, Any]) -> Any:
        action = body.get("action")
        if action == "checksum":
            checksums = await self.loop.call(self.engine.checksums)
            return {"success": True, "message": "", "checksums": checksums}
        if action not in ("compare", "compare_adapter"):
            raise BadRequest(
                f"action is {shown(action)}: expected checksum, or compare or compare_adapter with a manifest"
            )
        held = self.engine.weights if action == "compare" else self.engine.adapters
        manifest = await _read_manifest(body.get("manifest"))
        source = await asyncio.to_thread(SharedMemorySource, manifest)
        try:
            mismatched = await self.loop.call(held.differing, source)
        finally:
            source.close()
        return {"success": not mismatched, "message": "", "mismatched": mismatched}

    # -- memory ----------------------------------------------------------------------------------------------

    async def release_memory(self, body: dict[str, Any]) -> None:
        await self.loop.call(self.engine.release, _read_tags(body))

    async def resume_memory(self, body: dict[str, Any]) -> None:
        await self.loop.call(self.engine.restore, _read_tags(body))


def make_static_info(engine: Engine, model_path: str, version: str) -> dict[str, Any]:
    """Return the part of /server_info that does not change."""
    runner = engine.runner
    return {
        "engine": _DIALECT.name,
        "version": version,
        "model_path": model_path,
        "vocab_size": runner.vocab_size,
        "context_length": runner.context_len,
        "transports": list(_DIALECT.transports),
        "enable_lora": True,
        "takes_images": runner.vision is not None,
        "device": str(runner.device),
        "dtype": str(runner.dtype).removeprefix("torch."),
        "max_running_requests": engine.max_running,
        "max_total_num_tokens": runner.num_blocks * engine.allocator.block_size,
        "tp_size": 1,
        "pp_size": 1,
        "dp_size": 1,
    }


def _updated(version: str, count: int, nbytes: int, checksum: int | None) -> dict[str, Any]:
    return {
        "success": True,
        "message": f"{count} tensors are now version {version}",
        "weight_version": version,
        "num_tensors": count,
        "nbytes": nbytes,
        "checksum": checksum,
    }


async def _read_json(request: web.Request) -> dict[str, Any]:
    if request.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise web.HTTPUnsupportedMediaType(
            text="compressed bodies are not accepted: a small one may expand to any size\n"
        )
    try:
        async with asyncio.timeout(_BODY_DEADLINE_S):
            raw = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body took more than {_BODY_DEADLINE_S:g} s\n") from None
    try:
        body = json.loads(raw or b"{}", parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {shown(str(error))}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


async def _read_manifest(data: Any) -> WeightManifest:
    """Read a manifest on another thread: a large model's has tens of thousands of entries."""
    try:
        return await asyncio.to_thread(WeightManifest.from_json, data)
    except ValueError as error:
        raise BadRequest(str(error)) from error


def _read_tags(body: dict[str, Any]) -> list[str]:
    tags = list(TAGS) if body.get("tags") is None else body["tags"]
    if not isinstance(tags, list) or any(tag not in TAGS for tag in tags):
        raise BadRequest(f"tags is {shown(tags)}: expected a list out of {TAGS}")
    return tags


def _reading(generate: Generate) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return await generate(request, await _read_json(request))

    return handle


def _as_handler(control: Control) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        answer = await control(await _read_json(request))
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)

    return handle


def _error(status: int, message: str, /, **more: Any) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return web.json_response({**error_json(message, kind), **more}, status=status)


@web.middleware
async def _errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except BadWeights as error:
        return _error(400, str(error), success=False, message=str(error))
    except BadRequest as error:
        return _error(400, str(error))
    except RequestFailed as error:
        return _error(error.status, str(error))

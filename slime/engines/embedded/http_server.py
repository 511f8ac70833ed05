"""The HTTP server of the embedded engine: SGLang's endpoints, and one for weights in shared memory."""

import asyncio
import functools
import json
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from aiohttp import web

from slime.catalog.engines import ENGINES
from slime.engines.embedded.adapter import AdaptedWeights, AdapterConfig
from slime.engines.embedded.body_reading import MAX_BODY_BYTES, read_json, read_manifest, read_tags
from slime.engines.embedded.engine import Engine
from slime.engines.embedded.engine_thread import EngineLoop
from slime.engines.embedded.generate_json import (
    BadRequest,
    RequestFailed,
    RequestLimits,
    RequestReader,
    answer_json,
    raise_failure,
)
from slime.engines.embedded.openai_api import OpenAIApi
from slime.engines.embedded.openai_requests import OpenAIReader
from slime.engines.embedded.request_images import ImageReader
from slime.engines.embedded.sequence import Sequence
from slime.engines.embedded.update_groups import GroupPlace, UpdateGroups, read_bucket
from slime.engines.embedded.weight_update import (
    BadWeights,
    DiskSource,
    GroupSource,
    SharedMemorySource,
    Source,
    WeightStore,
)
from slime.utils.browser_guard import browser_guard, names_of_this_machine
from slime.utils.machine.open_files import refusing_too_many
from slime.utils.media.image_tokens import encoder_of
from slime.utils.processing_utils import load_processor
from slime.wire.control import PAUSE_MODES
from slime.wire.openai_shapes import error_json, model_list
from slime.wire.protocol import shown

logger = logging.getLogger(__name__)
_as_json = json.JSONEncoder(check_circular=False).encode  # `json.dumps` makes one for each call

_DIALECT = ENGINES["embedded"].dialect

_SMALL_BODY_BYTES = 1 << 18  # requests of up to so many bytes, and without text, are read where they come in


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Handlers of requests; made on the asyncio thread, and the engine runs from then on.

    Each lets the engine's thread do the work; what takes long before that (text, weights) has threads too.
    """

    def __init__(
        self,
        engine: Engine,
        static_info: dict[str, Any],
        seed: int,
        token: str | None = None,
        host: str = "127.0.0.1",
    ):
        self.engine, self._token, self._host = engine, token, host
        self.static_info = static_info
        eos = engine.runner.eos_token_ids
        if engine.detokenizer.eos_token_id is not None:
            eos |= {engine.detokenizer.eos_token_id}
        limits = RequestLimits(engine.runner.vocab_size, engine.runner.context_len, engine.max_tokens, eos)
        images = _image_reader(engine, static_info["model_path"])
        self.reader = RequestReader(limits, engine.detokenizer, seed, images)
        self.groups = UpdateGroups(engine.runner.device)
        self.model_path = static_info["model_path"]
        self.loop = EngineLoop(engine)
        # Of its own: whoever waits for weights takes a thread for long, and requests must not wait for that.
        self._reading = ThreadPoolExecutor(1, "requests")

    def make_app(self) -> web.Application:
        known = names_of_this_machine([self._host]) if self._token is None else None
        guards = [browser_guard(known=known), self._ask_for_token, _errors_as_json]
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=guards)
        both: dict[str, Handler] = {
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
        openai = OpenAIApi(self.loop, OpenAIReader(self.reader, self._reading, self.model_path), self._accept)
        post: dict[str, Handler] = {
            "/generate": refusing_too_many(self.generate),
            "/v1/chat/completions": refusing_too_many(openai.chat),
            "/v1/completions": refusing_too_many(openai.completions),
            "/abort_request": self.abort_request,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weights_from_disk": self.update_weights_from_disk,
            "/update_weights_from_shared_memory": self.update_weights_from_shared_memory,
            "/init_weights_update_group": self.join_group,
            "/destroy_weights_update_group": self.leave_group,
            "/update_weights_from_distributed": self.update_weights_from_group,
            "/load_lora_adapter_from_shared_memory": self.load_adapter,
            "/update_weight_version": self.update_weight_version,
            "/weights_checker": self.weights_checker,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        for path, handler in both.items():
            app.router.add_get(path, handler)
        app.router.add_post("/flush_cache", self.flush_cache)
        for path, handler in post.items():
            app.router.add_post(path, handler)
        return app

    @web.middleware
    async def _ask_for_token(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Asks everybody for the token, as SGLang does with its --api-key, but for the probes."""
        if self._token is not None and not request.path.startswith("/health"):
            given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
            if not secrets.compare_digest(given, f"Bearer {self._token}".encode()):
                return web.json_response({"error": "Unauthorized"}, status=401)
        return await handler(request)

    # -- generation ------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        sequences, is_list = await self._accept(request, await read_json(request))
        if sequences[0].stream:
            return await self._stream(request, sequences, is_list)
        answers = await self._finish(sequences)
        return web.json_response(answers if is_list else answers[0])

    async def _accept(self, request: web.Request, body: dict[str, Any]) -> tuple[list[Sequence], bool]:
        """The sequences that a body of /generate asks for; RequestFailed where none can be served now."""
        if self.engine.awaiting_weights:
            raise RequestFailed(503, "the engine waits for its first weights")
        if self.engine.released:
            released = sorted(self.engine.released)
            raise RequestFailed(503, f"memory is released ({released}): call /resume_memory_occupation")
        self._check_adapter(body.pop("lora_path", None))
        return await self._read(body, request.content_length)

    async def _read(self, body: dict[str, Any], nbytes: int | None) -> tuple[list[Sequence], bool]:
        if (
            "text" not in body
            and not body.get("image_data")
            and nbytes is not None
            and nbytes <= _SMALL_BODY_BYTES
        ):
            return self.reader.read(body)
        return await asyncio.get_running_loop().run_in_executor(self._reading, self.reader.read, body)

    def _check_adapter(self, wanted: Any) -> None:
        """A request may name the adapters that all requests get, and no others."""
        if wanted is not None and wanted != self.engine.adapters.name:
            held = self.engine.adapters.name or "no adapters"
            raise BadRequest(f"lora_path is {shown(wanted)}: this engine has {held}")

    async def _finish(self, sequences: list[Sequence]) -> list[dict[str, Any]]:
        listener = self.loop.submit(sequences)
        try:
            while not all(sequence.done for sequence in sequences):
                await listener.wait()
            raise_failure(sequences)
            return [answer_json(sequence, self.engine.detokenizer) for sequence in sequences]
        finally:
            for sequence in sequences:
                self.loop.forget(sequence)

    async def _stream(
        self, request: web.Request, sequences: list[Sequence], is_list: bool
    ) -> web.StreamResponse:
        """Events of all sequences of a request as they come; those of a list say whose they are by `index`.

        Of a list, one that failed has no last event: whoever asks for it alone learns why.
        """
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        waiting = {sequence: {"index": place} if is_list else {} for place, sequence in enumerate(sequences)}
        listener = self.loop.submit(sequences)
        try:
            while waiting:
                chunks = []
                for sequence in dict.fromkeys(await listener.wait()):
                    if sequence.failed:
                        waiting.pop(sequence, None)
                    elif sequence in waiting:
                        chunk = answer_json(sequence, self.engine.detokenizer) | waiting[sequence]
                        chunks.append(f"data: {_as_json(chunk)}\n\n")
                        if chunk["meta_info"]["finish_reason"] is not None:
                            del waiting[sequence]
                if not chunks and waiting:
                    continue
                if not response.prepared:
                    if not chunks:
                        raise_failure(sequences)
                    await response.prepare(request)
                elif not chunks and not is_list:  # what was sent cannot be taken back
                    if request.transport is not None:
                        request.transport.abort()
                    return response
                data = "".join(chunks).encode()
                await (response.write(data) if waiting else response.write_eof(data + b"data: [DONE]\n\n"))
        finally:
            for sequence in sequences:
                self.loop.forget(sequence)
        return response

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        rid, prefix = body.get("rid"), body.get("prefix", False)
        if not isinstance(prefix, bool):
            raise BadRequest(f"prefix is {shown(prefix)}: expected true or false")
        if not body.get("abort_all") and (not isinstance(rid, str) or (prefix and not rid)):
            raise BadRequest('give "rid": string, not empty with "prefix": true, or "abort_all": true')
        chosen = None if body.get("abort_all") else rid
        await self.loop.call_and_tell(functools.partial(self.engine.abort, prefix=prefix), chosen)
        return web.Response()

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await read_json(request)).get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise BadRequest(f"mode is {shown(mode)}: expected one of {PAUSE_MODES}")
        await self.loop.call_and_tell(self.engine.pause, mode)
        return web.json_response({"status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await self.loop.call(self.engine.resume)
        return web.json_response({"status": "ok"})

    # -- state -----------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.loop.alive else 503)

    async def health_generate(self, request: web.Request) -> web.Response:
        """One token through the whole engine.

        A busy engine shows it by its next forward pass, without queueing behind thousands of requests; one
        that may not generate now (paused, released, without weights) only has to answer between steps.
        """
        engine = self.engine
        if engine.paused or engine.released or engine.awaiting_weights or engine.is_mixed:
            await self.loop.call(lambda: None)
            return web.Response()
        if self.engine.can_step:
            passes = self.engine.runner.num_forward_passes
            while self.engine.can_step and self.engine.runner.num_forward_passes == passes:
                await asyncio.sleep(0.01)
            return web.Response()
        probe, _ = self.reader.read(
            {
                "input_ids": [0],
                "rid": f"health-{time.monotonic_ns()}",
                "sampling_params": {"max_new_tokens": 1},
            }
        )
        try:
            await self._finish(probe)
        except RequestFailed as error:
            return _error(503, str(error))
        return web.Response()

    async def server_info(self, request: web.Request) -> web.Response:
        state = await self.loop.call(self.engine.state)
        return web.json_response({**self.static_info, "model_path": self.model_path, **state})

    async def model_info(self, request: web.Request) -> web.Response:
        info = {"model_path": self.model_path, "weight_version": self.engine.version, "is_generation": True}
        return web.json_response(info)

    async def models(self, request: web.Request) -> web.Response:
        names = [self.model_path, *([self.engine.adapters.name] if self.engine.adapters.name else ())]
        limits = {"root": self.model_path, "max_model_len": self.engine.runner.context_len}
        return web.json_response(model_list(names, **limits))

    async def loads(self, request: web.Request) -> web.Response:
        state = await self.loop.call(self.engine.state)
        load = {"dp_rank": 0} | {k: state[k] for k in ("num_running_reqs", "num_waiting_reqs")}
        load["num_total_reqs"] = load["num_running_reqs"] + load["num_waiting_reqs"]
        load["queues"] = {"waiting": state["num_waiting_reqs"], "retracted": state["num_retracted_reqs"]}
        return web.json_response({"timestamp": time.time(), "dp_rank_count": 1, "loads": [load]})

    async def flush_cache(self, request: web.Request) -> web.Response:
        await self.loop.call(self.engine.allocator.flush)
        return web.Response(text="Cache flushed.\n")

    # -- weights ---------------------------------------------------------------------------------------------

    async def _update(
        self,
        open_source: Callable[[], Source],
        held: WeightStore | AdaptedWeights,
        apply: Callable[[Source], tuple[int, int]],
    ) -> tuple[int, int]:
        """Open and check while others generate; only the copy stops them. Returns (tensors, bytes)."""

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

    async def update_weights_from_shared_memory(self, request: web.Request) -> web.Response:
        manifest = await read_manifest(await read_json(request))
        engine = self.engine
        count, _ = await self._update(
            lambda: SharedMemorySource.open(manifest),
            engine.weights,
            lambda source: engine.update_weights(source, manifest.version),
        )
        return _updated(manifest.version, count, manifest.nbytes, manifest.checksum)

    async def load_adapter(self, request: web.Request) -> web.Response:
        """Low-rank adapters, by a manifest; all requests get them, whether or not they name them."""
        body = await read_json(request)
        name, manifest = body.get("lora_name"), await read_manifest(body.get("manifest"))
        if not isinstance(name, str) or not name:
            raise BadRequest("lora_name must be a string")
        config, engine = AdapterConfig.from_json(body.get("config_dict")), self.engine
        count, _ = await self._update(
            lambda: SharedMemorySource.open(manifest),
            engine.adapters,
            lambda source: engine.update_adapter(source, config, name, manifest.version),
        )
        return _updated(manifest.version, count, manifest.nbytes, manifest.checksum)

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body, engine = await read_json(request), self.engine
        path = body.get("model_path")
        if not isinstance(path, str):
            raise BadRequest("model_path must be a string")
        version = str(body.get("weight_version") or engine.version)
        count, nbytes = await self._update(
            lambda: DiskSource(path), engine.weights, lambda source: engine.update_weights(source, version)
        )
        self.model_path = path
        return _updated(version, count, nbytes, None)

    async def join_group(self, request: web.Request) -> web.Response:
        place = GroupPlace.from_json(await read_json(request))
        await asyncio.to_thread(self.groups.join, place)
        return web.json_response({"success": True, "message": f"rank {place.rank} of {place.name}"})

    async def leave_group(self, request: web.Request) -> web.Response:
        name = (await read_json(request)).get("group_name")
        left = await asyncio.to_thread(self.groups.leave, name)
        message = f"{name} is left" if left else f"{shown(name)} is not a group of this engine"
        return web.json_response({"success": left, "message": message}, status=200 if left else 400)

    async def update_weights_from_group(self, request: web.Request) -> web.Response:
        """One bucket. It comes while others generate; its copy stops them until the last bucket is in."""
        body = await read_json(request)
        version = str(body.get("weight_version") or self.engine.version)
        tensors = await asyncio.to_thread(self.groups.receive, body.get("group_name"), read_bucket(body))
        count, nbytes = await self.loop.call(self.engine.update_part, GroupSource(tensors), version)
        return _updated(version, count, nbytes, None)

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise BadRequest("new_version must be a string")
        if body.get("abort_all_requests"):
            await self.loop.call_and_tell(self.engine.abort, None)
        await self.loop.call(self.engine.set_version, version)
        return web.json_response({"success": True, "message": f"weight version is now {version}"})

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        action = body.get("action")
        if action == "checksum":
            checksums = await self.loop.call(self.engine.checksums)
            return web.json_response({"success": True, "message": "", "checksums": checksums})
        if action in ("compare", "compare_adapter"):
            held = self.engine.weights if action == "compare" else self.engine.adapters
            source = await asyncio.to_thread(
                SharedMemorySource.open, await read_manifest(body.get("manifest"))
            )
            try:
                mismatched = await self.loop.call(held.differing, source)
            finally:
                source.close()
            return web.json_response({"success": not mismatched, "message": "", "mismatched": mismatched})
        raise BadRequest(
            f"action is {shown(action)}: expected checksum, or compare or compare_adapter with a manifest"
        )

    # -- memory ----------------------------------------------------------------------------------------------

    async def release_memory(self, request: web.Request) -> web.Response:
        await self.loop.call(self.engine.release, read_tags(await read_json(request)))
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        await self.loop.call(self.engine.restore, read_tags(await read_json(request)))
        return web.json_response(None)


def _image_reader(engine: Engine, model_path: str) -> ImageReader | None:
    """What makes inputs of images; None where the model reads text only, or has no processor for images."""
    processor = load_processor(model_path) if engine.runner.vision is not None else None
    return None if processor is None else ImageReader(encoder_of(processor), engine.runner.model.config)


def make_static_info(engine: Engine, model_path: str, version: str) -> dict[str, Any]:
    """The part of /server_info that does not change."""
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


def _updated(version: str, count: int, nbytes: int, checksum: int | None) -> web.Response:
    message = f"{count} tensors are now version {version}"
    answer = {
        "success": True,
        "message": message,
        "weight_version": version,
        "num_tensors": count,
        "nbytes": nbytes,
    }
    return web.json_response({**answer, "checksum": checksum})


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

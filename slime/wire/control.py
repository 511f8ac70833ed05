"""The control plane of one engine worker: pause, weights, memory, health. Never through the router."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from slime.liveness import waits
from slime.utils import http_utils
from slime.wire.protocol import EngineInfo

if TYPE_CHECKING:  # it imports torch, which the router and the rollout do not need
    from slime.wire.manifest import WeightManifest

PauseMode = Literal["abort", "retract", "in_place"]
PAUSE_MODES: tuple[PauseMode, ...] = ("abort", "retract", "in_place")
Tag = Literal["weights", "kv_cache", "cuda_graph"]
TAGS: tuple[Tag, ...] = ("weights", "kv_cache", "cuda_graph")


@dataclass(frozen=True, slots=True)
class Receipt:
    """The weights that an engine reports to hold. `None`: this engine does not report it."""

    version: str
    tensors: int | None
    nbytes: int | None
    checksum: int | None


class NoChecksums(RuntimeError):
    """This engine does not report checksums of its tensors."""


class EngineControl:
    """Controls one worker, addressed directly. Every call has a name and a deadline; none is retried."""

    def __init__(self, url: str, deadline_s: float = 120.0):
        self.url = url.rstrip("/")
        self.deadline_s = deadline_s

    async def pause(self, mode: PauseMode = "abort") -> None:
        """Pause. abort: requests return now. retract: they start again. in_place: they keep their KV."""
        await self._post("pause_generation", {"mode": mode})

    async def resume(self) -> None:
        await self._post("continue_generation", {})

    async def flush(self) -> None:
        """Forget the prefix cache."""
        await self._post("flush_cache", {})

    async def release(self, tags: Iterable[Tag] = TAGS) -> None:
        await self._post("release_memory_occupation", {"tags": list(tags)})

    async def restore(self, tags: Iterable[Tag] = TAGS) -> None:
        await self._post("resume_memory_occupation", {"tags": list(tags)})

    async def info(self) -> EngineInfo:
        return EngineInfo.from_json(
            await self._get_either("server_info"), await self._get_either("model_info")
        )

    async def version(self) -> str:
        return str((await self._get_either("model_info"))["weight_version"])

    async def loaded_version(self) -> str | None:
        """Return the weight version that the engine holds; None if it does not respond in time."""
        try:
            return await self.version()
        except (http_utils.HttpError, TimeoutError, KeyError, TypeError):
            return None

    async def load(self) -> tuple[int, int]:
        """Return the number of running and of waiting requests of an engine."""
        loads = (await self._get("v1/loads"))["loads"]
        return sum(x["num_running_reqs"] for x in loads), sum(x["num_waiting_reqs"] for x in loads)

    async def forward_seconds(self) -> float | None:
        """Return the seconds of its forward passes since its start; None: it does not count them."""
        seconds: float | None = (await self._get_either("server_info")).get("forward_s")
        return seconds

    async def healthy(self, deadline_s: float = 5.0) -> bool:
        """Return whether the worker generates a token within the deadline."""
        try:
            await http_utils.get(f"{self.url}/health_generate", timeout_s=deadline_s)
        except (http_utils.HttpError, TimeoutError):
            return False
        return True

    async def set_version(self, version: str) -> None:
        await self._post("update_weight_version", {"new_version": version, "abort_all_requests": False})

    async def update_from_disk(self, path: str, version: str) -> Receipt:
        """Load a checkpoint folder that the worker can read."""
        # The format is said because an engine that was started without weights would make some up again.
        how = {"flush_cache": True, "load_format": "auto"}
        payload = {"model_path": str(path), "weight_version": version, **how}
        return _receipt(await self._post("update_weights_from_disk", payload), version)

    async def update_from_delta(self, folder: str, base: str, version: str) -> Receipt:
        """Apply a published delta in place, on engines that can (see Dialect); they must hold `base`."""
        payload = {"folder": folder, "base_version": base, "weight_version": version}
        return _receipt(await self._post("update_weights_from_delta", payload), version)

    async def update_from_shared_memory(self, manifest: WeightManifest) -> Receipt:
        """Load weights from shared memory; after a checksum mismatch the old version stays."""
        answer = await self._post("update_weights_from_shared_memory", manifest.to_json())
        return _receipt(answer, manifest.version)

    async def load_adapter_from_shared_memory(
        self, name: str, manifest: WeightManifest, config: Mapping[str, Any]
    ) -> Receipt:
        """Replace the low-rank adapters, which are verified before anything is applied."""
        payload = {"lora_name": name, "config_dict": dict(config), "manifest": manifest.to_json()}
        return _receipt(await self._post("load_lora_adapter_from_shared_memory", payload), manifest.version)

    async def load_adapter_from_tensors(
        self, name: str, payloads: Sequence[str], config: Mapping[str, Any], checksums: Mapping[str, str]
    ) -> None:
        """Send low-rank adapters in SGLang's format, a text per rank; `checksums`: SHA-256 of each tensor."""
        payload = {
            "lora_name": name,
            "config_dict": dict(config),
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
            "expected_checksums": dict(checksums),
            "pinned": True,
        }
        _accepted(await self._post("load_lora_adapter_from_tensors", payload), f"adapter {name}")

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; return when no request uses it any more."""
        _accepted(await self._post("unload_lora_adapter", {"lora_name": name}), f"to unload adapter {name}")

    async def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that the engine holds."""
        models = (await self._get("v1/models"))["data"]
        return tuple(model["id"] for model in models if model.get("parent"))

    async def begin_update(self) -> None:
        """Open an update by tensors or by a process group, on engines that have it (see EngineInfo)."""
        await self._post("begin_weight_update", {})

    async def end_update(self) -> None:
        await self._post("end_weight_update", {})

    async def update_from_tensors(self, payloads: Sequence[str], version: str) -> None:
        """Send a bucket in SGLang's own format: base64, one text per tensor-parallel rank of the engine."""
        payload = {
            "serialized_named_tensors": list(payloads),
            "load_format": "flattened_bucket",
            "flush_cache": False,
            "weight_version": version,
        }
        _accepted(await self._post("update_weights_from_tensor", payload), version)

    async def join_group(
        self, address: str, port: int, rank_offset: int, world_size: int, name: str, backend: str
    ) -> None:
        """Have the engine's ranks join a process group whose rank 0 is at the address; waits for all."""
        payload = {
            "master_address": address,
            "master_port": port,
            "rank_offset": rank_offset,
            "world_size": world_size,
            "group_name": name,
            "backend": backend,
        }
        _accepted(await self._post("init_weights_update_group", payload), name)

    async def leave_group(self, name: str) -> None:
        await self._post("destroy_weights_update_group", {"group_name": name})

    async def update_from_group(
        self, tensors: Sequence[tuple[str, str, Sequence[int]]], group: str, version: str
    ) -> None:
        """Take a bucket that rank 0 of the group broadcasts: (name, dtype, shape) per tensor, in order."""
        payload = {
            "names": [name for name, _, _ in tensors],
            "dtypes": [dtype for _, dtype, _ in tensors],
            "shapes": [list(shape) for _, _, shape in tensors],
            "group_name": group,
            "flush_cache": False,
            "weight_version": version,
        }
        _accepted(await self._post("update_weights_from_distributed", payload), version)

    async def checksums(self) -> dict[str, str]:
        """Return the engine's checksum of each of its tensors, under its own names (some may be fused)."""
        answer = await self._post("weights_checker", {"action": "checksum"})
        if "checksums" in answer:
            return {name: str(value) for name, value in answer["checksums"].items()}
        ranks = answer.get("ranks") or answer.get("payload")
        if not ranks:
            raise NoChecksums(f"{self.url}/weights_checker answered {str(answer)[:200]}")
        return {
            f"{rank}:{name}": value
            for rank, one in enumerate(ranks)
            for name, value in one["checksums"].items()
        }

    async def overwrite_weights(self) -> None:
        """Overwrite the weights that have checksums with noise: only a whole push makes it fit again."""
        answer = await self._post("weights_checker", {"action": "reset_tensors"})
        _accepted(answer, "to overwrite its weights")

    async def score(self, ids: Sequence[int], extra: Mapping[str, Any]) -> list[float]:
        """Return log-probs of all tokens but the first, at temperature 1; nothing is sampled or cached."""
        payload = {
            "input_ids": list(ids),
            "sampling_params": {"temperature": 1.0, "max_new_tokens": 0, "sampling_seed": 0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._post("generate", {**payload, **extra})
        entries = (answer.get("meta_info") or {}).get("input_token_logprobs") or []
        if [entry[1] for entry in entries] != list(ids):
            raise ValueError(f"{self.url} scored {len(entries)} tokens of an input of {len(ids)}")
        return [float(entry[0]) for entry in entries[1:]]

    async def check_equal(self, manifest: WeightManifest, *, adapter: bool = False) -> list[str]:
        """Return the names of tensors that differ from the manifest, or that only one side has."""
        payload = {"action": "compare_adapter" if adapter else "compare", "manifest": manifest.to_json()}
        return list((await self._post("weights_checker", payload))["mismatched"])

    async def _post(self, endpoint: str, payload: dict[str, Any]) -> Any:
        url = f"{self.url}/{endpoint}"
        async with waits.limited(f"POST {url}", self.deadline_s, target=self.url):
            return await http_utils.post(url, payload, max_retries=0)

    async def _get_either(self, endpoint: str) -> Any:
        """Get an endpoint whose name begins with `get_` in some versions of SGLang."""
        try:
            return await self._get(endpoint)
        except http_utils.HttpError as error:
            if error.status != 404:
                raise
            return await self._get(f"get_{endpoint}")

    async def _get(self, endpoint: str) -> Any:
        url = f"{self.url}/{endpoint}"
        # It is asked again and again, whatever the run does.
        async with waits.limited(f"GET {url}", self.deadline_s, target=self.url, moves=False):
            return await http_utils.get(url)


def _accepted(answer: dict[str, Any], what: str) -> None:
    if not answer.get("success"):
        raise RuntimeError(
            f"the engine refused {what}: {answer.get('message') or answer.get('error_message')}"
        )


def _receipt(answer: dict[str, Any], version: str) -> Receipt:
    _accepted(answer, f"weights {version}")
    return Receipt(
        version=str(answer.get("weight_version", version)),
        tensors=answer.get("num_tensors"),
        nbytes=answer.get("nbytes"),
        checksum=answer.get("checksum"),
    )

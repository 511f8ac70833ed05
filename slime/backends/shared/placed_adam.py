"""AdamW whose moments lie in host memory, or in fewer bits, or both.

The step itself always uses torch's fused kernel on the parameters' device: moments in host memory pass
through that device piece by piece, so that a step in fp32 gives the same bits as with moments on the device.
(A step on the CPU would move fewer bytes, but all ranks of a machine share its cores.) With `overlap`, one
piece is loaded while another is updated and a third is written back.
"""

import itertools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from slime.arguments import Args
from slime.backends.shared.host_memory import HostMemory
from slime.backends.shared.moment_formats import BLOCK, FORMATS, blocks_of, pack, unpack
from slime.utils.machine.accelerator import gpu

MOMENTS = ("exp_avg", "exp_avg_sq")
_PIECE = 1 << 23  # numbers on the device at a time; a multiple of the block that shares a scale
_SLOTS = 3  # pieces on the device: one is loaded, one updated, one written back
_SCALES = "_scales"  # suffix of a moment's name: the exponents of its blocks
_PRIMES = (1_000_003, 7_368_787)


@dataclass(frozen=True, slots=True)
class MomentPlan:
    """Device and precision of Adam's moments. The default is torch's own AdamW."""

    host_share: float = 0.0  # of the parameters
    overlap: bool = False
    formats: tuple[str, str] = ("fp32", "fp32")  # of the first and of the second moment

    @classmethod
    def of(cls, args: Args) -> Self:
        share = args.optimizer_offload_fraction if args.optimizer_cpu_offload else 0.0
        overlap = args.overlap_cpu_optimizer_d2h_h2d
        return cls(share, overlap, (args.exp_avg_dtype, args.exp_avg_sq_dtype))

    @property
    def is_plain(self) -> bool:
        return self == MomentPlan(overlap=self.overlap)


class PlacedAdamW(torch.optim.Optimizer):
    """`torch.optim.AdamW`, with its state in fp32; a sharded parameter has that of this rank's part."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], plan: MomentPlan, *, staged: bool = False, **defaults: Any
    ) -> None:
        """`staged`: use the transfer path on a CPU as well, which tests need."""
        super().__init__([torch.empty(0)], {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, **defaults})
        # Not through `add_param_group`, which refuses views, such as the shards of Megatron's buffers.
        self.param_groups = list(groups)
        for group, (name, value) in itertools.product(self.param_groups, self.defaults.items()):
            group.setdefault(name, value)
        self.formats = dict(zip(MOMENTS, (FORMATS[name] for name in plan.formats), strict=True))
        self.hosted = _first_share(self._parameters(), plan.host_share)
        self._overlap, self._staged = plan.overlap, staged
        self._host = HostMemory()
        self.parked: frozenset[Tensor] = frozenset()  # parameters without memory on the device; see `park`

    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        transfers = None
        trained = [(group, p) for group in self.param_groups for p in group["params"]]
        for index, (group, parameter) in enumerate(trained):
            if parameter.grad is None or not local(parameter).numel():
                continue
            state = self._state_of(parameter)
            if self._passes_through(parameter) and transfers is None:
                transfers = _Transfers(local(parameter).device, overlap=self._overlap)
            self._step_one(group, parameter, state, index, transfers)
            state["step"] += 1
        if transfers is not None:
            transfers.finish()

    def _passes_through(self, parameter: Tensor) -> bool:
        return parameter in self.hosted and (self._staged or parameter.device.type != "cpu")

    def _step_one(
        self,
        group: dict[str, Any],
        parameter: Tensor,
        state: dict[str, Tensor],
        index: int,
        transfers: "_Transfers | None",
    ) -> None:
        weight, gradient = local(parameter), local(parameter.grad)  # type: ignore[arg-type]
        step, passes = int(state["step"]), self._passes_through(parameter)
        parts = [state[name] for name in MOMENTS]
        if not passes and all(kept.dtype == torch.float32 for kept in self.formats.values()):
            _update(group, weight, gradient, parts, step)
            return
        flat, gradients = weight.view(-1), gradient.reshape(-1)
        for start in range(0, len(flat), _PIECE):
            piece = slice(start, start + _PIECE)
            moments = [self._piece(state, name, start) for name in MOMENTS]
            moving = transfers.passing(moments) if passes and transfers else nullcontext(moments)
            seed = ((step * _PRIMES[0] + index) * _PRIMES[1] + start) % 2**62
            with moving as here:
                self._update_packed(group, flat[piece], gradients[piece], here, step, seed)

    def _piece(self, state: dict[str, Tensor], name: str, start: int) -> list[Tensor]:
        """Return a part of a moment: its numbers, and the exponents of its blocks if it has them."""
        found = [state[name].view(-1)[start : start + _PIECE]]
        if name + _SCALES in state:
            first = start // BLOCK
            found.append(state[name + _SCALES][first : first + _PIECE // BLOCK])
        return found

    def _update_packed(
        self,
        group: dict[str, Any],
        weight: Tensor,
        gradient: Tensor,
        moments: list[list[Tensor]],
        step: int,
        seed: int,
    ) -> None:
        second = [name == MOMENTS[1] for name in MOMENTS]
        whole = [unpack(parts, second=is_second) for parts, is_second in zip(moments, second, strict=True)]
        _update(group, weight, gradient, whole, step)
        generator = torch.Generator(weight.device).manual_seed(seed)
        for parts, values, kept, is_second in zip(moments, whole, self.formats.values(), second, strict=True):
            if kept.dtype != torch.float32:  # `unpack` of float32 is the tensor itself
                for part, value in zip(
                    parts, pack(values, kept, second=is_second, generator=generator), strict=True
                ):
                    part.copy_(value)

    # -- the state -------------------------------------------------------------------------------------------

    def _state_of(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state of a parameter, which starts as zeros."""
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            weight = local(parameter)
            for name, kept in self.formats.items():
                state[name] = self._zeros(parameter, name, weight.shape, kept.dtype)
                if kept.top is not None:
                    blocks = (blocks_of(weight.numel()),)
                    state[name + _SCALES] = self._zeros(parameter, name + _SCALES, blocks, torch.int8)
        return state

    def _zeros(
        self, parameter: Tensor, name: str, shape: torch.Size | tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        if parameter in self.hosted:
            return self._host.place((parameter, name), shape, dtype).zero_()
        return torch.zeros(shape, dtype=dtype, device=parameter.device)

    @torch.no_grad()
    def park(self, copies: Iterable[Tensor]) -> None:
        """Keep fp32 copies of weights in host memory, too, next to their moments: only steps need them."""
        self.parked = frozenset(p for p in copies if p.numel() and self._passes_through(p))
        self._park()

    def _park(self) -> None:
        for parameter in self.parked:
            self._host.keep((parameter, "value"), parameter.data)
        if any(parameter.device.type == "cuda" for parameter in self.parked):
            gpu.synchronize()
        for parameter in self.parked:
            parameter.untyped_storage().resize_(0)

    @contextmanager
    def present(self) -> Iterator[None]:
        """Keep parked parameters on the device with their values within this block; they may be changed."""
        if all(parameter.untyped_storage().nbytes() for parameter in self.parked):
            yield  # also if this block is nested
            return
        with torch.no_grad():
            for parameter in self.parked:
                parameter.untyped_storage().resize_(parameter.nbytes)
                place = self._host.place((parameter, "value"), parameter.shape, parameter.dtype)
                parameter.data.copy_(place, non_blocking=True)
        try:
            yield
        finally:
            with torch.no_grad():
                self._park()

    def create_state(self) -> None:
        """Create the state that the first step would create, so that a checkpoint can be read into it."""
        for parameter in self._parameters():
            self._state_of(parameter)

    @contextmanager
    def plain_state(self) -> Iterator[None]:
        """Provide all moments in float32 within this block, under torch's names; they may be written to."""
        kept = {p: dict(state) for p, state in self.state.items() if state}
        packed = [name for name, own in self.formats.items() if own.dtype != torch.float32]
        for parameter, state in kept.items():
            for name in packed:
                self.state[parameter][name] = self._whole(parameter, state, name)
                self.state[parameter].pop(name + _SCALES, None)
        try:
            with self.present():
                yield
        finally:
            for parameter, state in kept.items():
                given = self.state[parameter]
                for name in packed:
                    self._keep(state, name, given[name])
                self.state[parameter] = {**state, "step": given["step"]}

    def _whole(self, parameter: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
        """Return a moment in float32, in host memory, because the device may not have room for it."""
        parts = [state[key].view(-1).cpu() for key in (name, name + _SCALES) if key in state]
        return unpack(parts, second=name == MOMENTS[1]).view(local(parameter).shape)

    def _keep(self, state: dict[str, Tensor], name: str, values: Tensor) -> None:
        # Moments from an fp32 checkpoint are rounded; moments that were saved from this format are unchanged.
        generator = torch.Generator().manual_seed(0)
        parts = pack(
            values.reshape(-1).cpu(), self.formats[name], second=name == MOMENTS[1], generator=generator
        )
        for key, part in zip((name, name + _SCALES), parts, strict=False):
            state[key].view(-1).copy_(part)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copy values into the existing tensors; torch would move all of them to the parameters' device."""
        self.create_state()
        for own, given in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update({name: value for name, value in given.items() if name != "params"})
        for index, parameter in enumerate(self._parameters()):
            own = self.state[parameter]
            for name, value in state_dict["state"].get(index, {}).items():
                if own[name] is not value:
                    own[name].copy_(value)

    def move(self, place: torch.device, host: HostMemory) -> None:
        """Move the state that is on the device to `place`, when a trainer leaves its device or returns."""
        resident = {p: self.state[p] for p in self._parameters() if p not in self.hosted and self.state[p]}
        for parameter, state in resident.items():
            for name in state.keys() - {"step"}:
                state[name] = host.move((parameter, name), state[name], place)


def _update(
    group: dict[str, Any], weight: Tensor, gradient: Tensor, moments: list[Tensor], step: int
) -> None:
    adamw(
        [weight],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [torch.full((), float(step), device=weight.device)],
        fused=True,
        amsgrad=False,
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Create the state that Adam's first step would create, so that a checkpoint can be read into it."""
    if hasattr(optimizer, "create_state"):
        optimizer.create_state()
    optimizer = getattr(optimizer, "adam", optimizer)  # of Muon
    if not isinstance(optimizer, torch.optim.Adam):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": step_on_its_device(torch.tensor(0.0), parameter, group),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def step_on_its_device(step: Tensor, parameter: Tensor, group: dict[str, Any]) -> Tensor:
    """Put the step on the parameters' device for a fused AdamW, else on the host."""
    return step.to(parameter.device if group.get("fused") else "cpu")


def _first_share(parameters: list[Tensor], share: float) -> frozenset[Tensor]:
    """Return the first parameters that together have this share of all numbers; all of them if it is 1."""
    chosen, left = [], share * sum(local(p).numel() for p in parameters)
    for parameter in parameters:
        if left <= 0:
            break
        chosen.append(parameter)
        left -= local(parameter).numel()
    return frozenset(chosen) if share < 1 else frozenset(parameters)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a (possibly sharded) tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# -- transfers -----------------------------------------------------------------------------------------------


class _Slot:
    """Room on the device for one piece of all moments."""

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self._bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.left: gpu.Event | None = None  # when its last content is in host memory

    def room_for(self, moments: list[list[Tensor]]) -> list[list[Tensor]]:
        found, start = [], 0
        for parts in moments:
            here = []
            for part in parts:
                here.append(self._bytes[start : start + part.nbytes].view(part.dtype))
                start += -(-part.nbytes // 256) * 256
            found.append(here)
        return found


class _Transfers:
    """Moves pieces of moments to a device and back during one step.

    Copies are asynchronous and ordered by streams. A slot is refilled only after its content was written
    back; the host reads moments only after `finish`.
    """

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self._current = gpu.current_stream(device) if device.type == "cuda" else None
        self._inward = self._outward = self._current
        if self._current is not None and overlap:
            self._inward, self._outward = gpu.Stream(device), gpu.Stream(device)
        largest = len(MOMENTS) * (_PIECE * 4 + _PIECE // BLOCK + 512)
        slots = [_Slot(largest, device) for _ in range(_SLOTS if overlap else 1)]
        self._next = itertools.cycle(slots)
        # The slots' memory may still be in use by earlier work of the current stream.
        _wait(self._inward, self._current)

    @contextmanager
    def passing(self, moments: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
        """Provide the moments on the device inside the block, then copy them back to host memory."""
        slot = next(self._next)
        here = slot.room_for(moments)
        with self._on(self._inward):
            if slot.left is not None and self._inward is not None:
                self._inward.wait_event(slot.left)
            _copy(here, moments)
        _wait(self._current, self._inward)
        yield here
        _wait(self._outward, self._current)
        with self._on(self._outward):
            _copy(moments, here)
            slot.left = self._outward.record_event() if self._outward is not None else None

    def _on(self, stream: gpu.Stream | None) -> AbstractContextManager[Any]:
        return gpu.stream(stream) if stream is not None else nullcontext()

    def finish(self) -> None:
        """Wait until all copies are in host memory; then the slots' memory may be reused."""
        if self._outward is not None:
            self._outward.synchronize()


def _wait(stream: gpu.Stream | None, other: gpu.Stream | None) -> None:
    if stream is not None and other is not None and stream is not other:
        stream.wait_stream(other)


def _copy(targets: list[list[Tensor]], sources: list[list[Tensor]]) -> None:
    for target_parts, source_parts in zip(targets, sources, strict=True):
        for target, source in zip(target_parts, source_parts, strict=True):
            target.copy_(source, non_blocking=True)

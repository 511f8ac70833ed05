"""The model and its KV pool on one device: runs forward passes, releases memory and allocates it again."""

from typing import Any

import numpy as np
import psutil
import torch

from slime.algorithms.vision.towers import attention_by_tower, family_of, run_text
from slime.engines.embedded import attention
from slime.engines.embedded.attention import BatchPlan, KVPool, PrefillGroup, ShapeProbe
from slime.engines.embedded.expert_record import ExpertRecord
from slime.engines.embedded.graphs import DecodeGraphs, decides_on_host
from slime.engines.embedded.norms import fuse_norms
from slime.engines.embedded.packed_matrices import PackedMatrices
from slime.engines.embedded.request_images import FeatureCache, ImageRows
from slime.engines.embedded.rules import NEEDS_OTHER, unserved_layers
from slime.engines.embedded.sequence import Sequence
from slime.utils.files.safetensors_files import files_by_tensor
from slime.utils.machine import accelerator
from slime.utils.machine.accelerator import gpu
from slime.utils.misc import is_installed
from slime.utils.models.hub_names import folder_of
from slime.utils.models.model_config import block_size_of

_CPU_POOL_BYTES = 256 << 20
_CUDA_POOL_SHARE = 0.4  # share of the memory that is free after the weights are loaded
_BLOCK_SIZE = 16
_SMALL_BLOCK_SIZE = 4  # if rows gather keys in spans: more of common prefixes is shared


class ModelRunner:
    """Runs the model on one device.

    `max_total_tokens` None: derived from the free memory, and at most what all requests could need.
    `fp8_block`: block size of FP8 weights in updates; None: as in the checkpoint.
    `records_experts`: responses can say which experts each token was sent to.
    `paged`: decoding reads keys in place, in recorded passes; None: on GPUs, if the model allows it.
    """

    def __init__(
        self,
        model_path: str,
        *,
        device: str,
        dtype: str,
        max_running: int,
        max_total_tokens: int | None,
        fp8_block: tuple[int, int] | None = None,
        paged: bool | None = None,
        records_experts: bool = False,
    ) -> None:
        from transformers import (  # late: takes seconds to import
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
            FineGrainedFP8Config,
        )
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()

        attention.register()
        found = "cuda" if gpu.is_available() else "cpu"
        self.device = torch.device(found if device == "auto" else device)
        self.dtype = accelerator.compute_dtype(dtype, self.device)
        # FP8 weights are dequantised: this engine has no FP8 kernels.
        held = block_size_of(model_path)
        self.fp8_block = fp8_block or held
        how = {"quantization_config": FineGrainedFP8Config(dequantize=True)} if held else {}
        self.vision = family_of(AutoConfig.from_pretrained(model_path))  # None: it reads text only
        implementation = attention.NAME if self.vision is None else attention_by_tower(attention.NAME)
        try:
            auto_class = AutoModelForCausalLM if self.vision is None else AutoModelForImageTextToText
            self.model: Any = auto_class.from_pretrained(
                model_path, dtype=self.dtype, attn_implementation=implementation, **how
            )
        except KeyError as error:
            if error.args != (attention.NAME,):
                raise
            # The family chooses its attention from its own table.
            raise ValueError(f"the model of {model_path} {NEEDS_OTHER}") from error
        self.model.to(self.device).eval().requires_grad_(False)
        self._matrices = PackedMatrices(self.model)
        self.config = self.model.config.get_text_config()
        kinds = unserved_layers(self.config)
        stateful = any(isinstance(module, torch.nn.Conv1d) for module in self.model.modules())
        if kinds or stateful or not self.model._supports_attention_backend:
            what = f"has {', '.join(kinds)} layers and " if kinds else ""
            raise ValueError(f"{type(self.model).__name__} {what}{NEEDS_OTHER}")
        self.experts = ExpertRecord(self.model) if records_experts else None
        self.features = FeatureCache(self.model, self.device)
        self.hub_names = frozenset(files_by_tensor(folder_of(model_path)))
        self.vocab_size: int = self.config.vocab_size
        self.context_len: int = self.config.max_position_embeddings
        probe = self._probe()
        self.kv_shapes = probe.shapes
        can_read_pages = self.device.type == "cuda" and is_installed("triton")
        self.paged = probe.plain and self.vision is None and (can_read_pages if paged is None else paged)
        self.max_running = max_running
        if self.paged and self.device.type == "cuda":
            from slime.engines.embedded.decode_kernels import rms_norm  # late: needs Triton

            fuse_norms(self.model, rms_norm)
        exact = self.device.type == "cpu" and self.dtype == torch.float32 and self.vision is None
        self.spans = exact and probe.plain and not self.paged
        self.block_size = _SMALL_BLOCK_SIZE if self.spans else _BLOCK_SIZE
        self.num_blocks = self._derive_num_blocks(max_running, max_total_tokens)
        self.num_forward_passes = 0
        self.pool: KVPool | None
        self.restore_pool()
        self._graphs: DecodeGraphs | None = None  # None: created when a pass needs them
        self._can_record = self.paged and not decides_on_host(self.config)

    @torch.inference_mode()
    def _probe(self) -> ShapeProbe:
        """Find the shape of each layer's keys and values by a pass: configs name it in different ways."""
        one, probe = torch.zeros(1, 1, dtype=torch.int64, device=self.device), ShapeProbe()
        try:
            if self.vision is None:
                self.model(input_ids=one, position_ids=one, use_cache=False, plan=None, pool=probe)
            else:
                run_text(self.model, one, one, None, None, plan=None, pool=probe)
        except (TypeError, KeyError) as error:  # a layer that does not pass its attention function on
            raise ValueError(f"{type(self.model).__name__} {NEEDS_OTHER} ({error})") from error
        if probe.repeats:
            raise ValueError(
                f"{type(self.model).__name__} attends several times in a layer, with keys of its own each "
                f"time, of which a pool holds one: it {NEEDS_OTHER}"
            )
        return probe

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one token's key in one layer, the widest."""
        return max(shape.heads * shape.key_dim for shape in self.kv_shapes.values()) * self.dtype.itemsize

    @property
    def eos_token_ids(self) -> frozenset[int]:
        eos = self.model.generation_config.eos_token_id
        return frozenset(() if eos is None else (eos,) if isinstance(eos, int) else eos)

    @property
    def image_ids(self) -> tuple[int, ...]:
        """Return tokens that are replaced by features: a response must not contain them."""
        names = ("image_token_id", "video_token_id") if self.vision is not None else ()
        values = self.model.config.to_dict()
        return tuple(values[name] for name in names if values.get(name) is not None)

    def _derive_num_blocks(self, max_running: int, max_total_tokens: int | None) -> int:
        if max_total_tokens is None:
            if self.device.type == "cuda":
                budget = int(gpu.mem_get_info(self.device)[0] * _CUDA_POOL_SHARE)
            else:
                budget = _CPU_POOL_BYTES
            token = sum(shape.width for shape in self.kv_shapes.values()) * self.dtype.itemsize
            affordable = budget // token
            max_total_tokens = min(max(affordable, self.context_len), max_running * self.context_len)
        return max(1, max_total_tokens // self.block_size)

    def restore_pool(self) -> None:
        # one more than can be allocated: block 0 is padding
        self.pool = KVPool(self.kv_shapes, self.num_blocks + 1, self.block_size, self.dtype, self.device)
        if self.experts is not None:
            self.experts.allocate((self.num_blocks + 1) * self.block_size, self.device)

    @torch.inference_mode()
    def forward(self, plan: BatchPlan) -> torch.Tensor:
        """Return logits `[N, vocab]` of the rows in the plan; keys and values are stored in the pool."""
        self.num_forward_passes += 1
        if self.experts is not None:
            self.experts.follow(plan.write_rows)
        if self.vision is not None:
            return self._forward_with_images(plan)
        if self._can_record and plan.only_decodes:
            replayed = self._replay(plan)
            if replayed is not None:
                return replayed
        return self._forward_text(plan)

    def _replay(self, plan: BatchPlan) -> torch.Tensor | None:
        if self._graphs is None:
            blocks = -(-min(self.context_len, self.num_blocks * self.block_size) // self.block_size)
            self._graphs = DecodeGraphs(
                self._forward_text, max_running=self.max_running, max_blocks=blocks, device=self.device
            )
        logits = self._graphs.run(plan)
        if logits is None:
            self._graphs, self._can_record = None, False
        return logits

    def _forward_text(self, plan: BatchPlan) -> torch.Tensor:
        out = self.model(
            input_ids=plan.token_ids,
            position_ids=plan.positions,
            use_cache=False,
            logits_to_keep=plan.logit_index,
            plan=plan,
            pool=self.pool,
        )
        logits: torch.Tensor = out.logits[0]
        return logits

    def _forward_with_images(self, plan: BatchPlan) -> torch.Tensor:
        rows, features = self.features.rows(plan.images) if plan.images else (None, None)
        positions = plan.positions if plan.grid is None else plan.grid
        hidden = run_text(self.model, plan.token_ids, positions, rows, features, plan=plan, pool=self.pool)
        logits: torch.Tensor = self.model.get_output_embeddings()(hidden[plan.logit_index])
        return logits

    def score(self, sequence: Sequence) -> list[float]:
        """Return log-probs of all prompt tokens but the first, given those before, at temperature 1.

        The most likely ids are put on the sequence, if they were requested.
        """
        tokens, pictures = sequence.prompt, sequence.pictures
        count = len(tokens)
        ids, positions = (torch.tensor(x, device=self.device) for x in (tokens, range(count)))
        # All keys are written to the padding page, so scoring leaves no trace.
        nowhere = torch.zeros(count, dtype=torch.int64, device=self.device)
        whole = PrefillGroup(0, 1, count, 0, None, None)
        grid = None
        if self.vision is not None and self.vision.grid_positions:
            places = np.ascontiguousarray(sequence.positions(0, count))
            grid = torch.from_numpy(places).to(self.device)[:, None]
        placed = () if pictures is None else pictures.images
        images = tuple(ImageRows(p.image, 0, len(p.places), p.places) for p in placed)
        plan = BatchPlan(
            ids[None], positions[None], nowhere, positions, (), (whole,), grid=grid, images=images
        )
        logits = self.forward(plan)
        log_probs = torch.log_softmax(logits[:-1].float(), -1)
        if sequence.num_top:
            top = (found.tolist() for found in log_probs.topk(sequence.num_top, -1))
            sequence.input_top = [list(zip(*row, strict=True)) for row in zip(*top, strict=True)]
        return log_probs.gather(1, ids[1:, None])[:, 0].tolist()

    @property
    def memory_bytes(self) -> int:
        """Return the bytes of this process in the memory of the model's device: the GPU's, or the host's."""
        if self.device.type == "cuda":
            return gpu.memory_reserved(self.device)
        return psutil.Process().memory_info().rss

    def check_device(self) -> None:
        """Raise if the device no longer works after a failed pass, like CUDA after an assertion."""
        if self.device.type == "cuda":
            gpu.synchronize(self.device)
            gpu.empty_cache()

    # -- memory ----------------------------------------------------------------------------------------------

    def release_pool(self) -> None:
        self.pool = self._graphs = None
        self._empty_cache()

    def release_weights(self) -> None:
        """Move parameters to host memory; on a CPU they are there already, and stay."""
        self.features.clear()
        self._matrices.forget()
        self._graphs = None
        if self.device.type == "cuda":
            self.model.to("cpu")
            self._empty_cache()

    def _empty_cache(self) -> None:
        if self.device.type == "cuda":
            gpu.empty_cache()

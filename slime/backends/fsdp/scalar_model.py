"""A decoder with a scalar head: the critic's value of each response token, or a reward model's score."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slime.backends.attention.share import Share
from slime.backends.base import MicroBatch
from slime.backends.fsdp.layer_execution import HFModel
from slime.backends.fsdp.model import PackedCausalLM, run_decoder
from slime.backends.shared.scalar_head import HEAD, draw_head
from slime.backends.torch_dist.reading import TorchDistFolder
from slime.utils.files.safetensors_files import files_by_tensor, read_tensors
from slime.utils.files.torch_dist_folder import is_torch_dist


class PackedScalarLM(nn.Module):
    """Predicts one number per response token, before the token (a critic) or after it (a reward model).

    The causal LM is kept, so that sharding, checkpoints and names are the same as for the policy; only the
    output matrix becomes a single row.
    """

    lm: HFModel

    def __init__(self, lm: HFModel, path: str | Path, *, after_token: bool, seed: int) -> None:
        super().__init__()
        self.offset = 1 if after_token else 0
        hidden = lm.get_input_embeddings().embedding_dim
        head = nn.Linear(hidden, 1, bias=False, dtype=torch.float32)
        saved = read_head(path, lm.config)
        if saved is not None:
            head.weight.data.copy_(saved)
        else:
            # Every rank draws the same numbers: each keeps its part of one matrix.
            head.weight.data.copy_(draw_head(hidden, seed))
        lm.config.tie_word_embeddings = False
        lm.set_output_embeddings(head)
        self.lm = lm

    def forward(self, mb: MicroBatch, share: Share | None = None) -> tuple[Tensor]:
        """Return values [R] in fp32, without a temperature; a tuple, so that FSDP finds the tensor."""
        hidden = run_decoder(self.lm, mb, share)
        rows = mb.logit_positions + self.offset if share is None else share.rows
        values = self.lm.get_output_embeddings()(hidden.index_select(0, rows)).squeeze(-1)
        # A copy: FSDP must not hand out a view.
        values = values.to(torch.float32, copy=True)
        return (values if share is None else share.join(values),)


PackedLM = PackedCausalLM | PackedScalarLM


def read_head(path: str | Path, hf_config: Any) -> Tensor | None:
    """Return the scalar head in a reward model's folder; None: it has none (a causal LM, a hub id)."""
    if is_torch_dist(path):
        folder = TorchDistFolder(path, hf_config)
        return folder.read(HEAD).float() if HEAD in folder.names else None
    name = files_by_tensor(Path(path)).get(HEAD)
    if name is None or not (Path(path) / name).is_file():
        return None
    return next((tensor.float() for _, tensor in read_tensors([Path(path) / name], [HEAD])), None)

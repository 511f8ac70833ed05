"""Says how the stages of a pipeline share the layers of a model, by the rules of megatron-core."""

import re
from collections.abc import Mapping
from typing import Any

_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_LAYOUT = "pipeline_model_parallel_layout"
_EXTRA = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")
_REPEATED = (r"\(([^)]+)\)\*(\d{1,3})", r"(.)\*(\d{1,3})")  # of a layout: (tt|)*3, then t*3


def layers_of_chunks(layers: int, stages: int, chunks: int, fields: Mapping[str, Any]) -> list[int]:
    """Return the number of layers of each chunk in the order of the model; ValueError if they do not add up.

    Chunk c of stage s is entry c * stages + s. `fields`: those of megatron-core's configuration. Example: 61
    layers on 4 stages of 1 chunk with {"num_layers_in_last_pipeline_stage": 13} give [16, 16, 16, 13].
    """
    if fields.get(_LAYOUT):
        return _layers_of_layout(layers, stages, chunks, str(fields[_LAYOUT]))
    ends = {place: fields[name] for place, name in ((0, _FIRST), (stages - 1, _LAST)) if fields.get(name)}
    extra = [int(bool(fields.get(name))) for name in _EXTRA]
    others, rest = stages - len(ends), layers + sum(extra) - sum(ends.values())
    each = rest // others if others else 0
    counts = [ends.get(stage, each) for stage in range(stages)]
    shares = [count // chunks for count in counts] * chunks
    shares[0], shares[-1] = shares[0] - extra[0], shares[-1] - extra[1]
    if sum(shares) != layers or min(shares) < 1 - max(extra) or (ends and any(extra)):
        parts = f"{stages} pipeline stages{f' of {chunks} chunks' if chunks > 1 else ''}"
        raise ValueError(
            f"the model has {layers} layers, which {parts} cannot share like this: use "
            "sizes whose product divides the layers, or --decoder-first-pipeline-num-layers, "
            "--decoder-last-pipeline-num-layers or --pipeline-model-parallel-layout."
        )
    return shares


def parts_of_layout(text: str) -> list[str]:
    """Return what --pipeline-model-parallel-layout gives each chunk: "Et*3|(tt|)*2L" is Ettt, tt, tt, L."""
    plain = text.replace(",", "")
    for pattern in _REPEATED:
        plain = re.sub(pattern, lambda found: found[1] * int(found[2]), plain)
    return plain.split("|")


def _layers_of_layout(layers: int, stages: int, chunks: int, text: str) -> list[int]:
    parts = parts_of_layout(text)
    counts = [part.count("t") for part in parts]
    if len(counts) != stages * chunks or sum(counts) != layers or not set("".join(parts)) <= set("EtmL"):
        of_chunks = f" of {chunks} chunks" if chunks > 1 else ""
        raise ValueError(
            f"--pipeline-model-parallel-layout is {text!r}, which has {sum(counts)} layers in {len(counts)} "
            f"parts; the model has {layers} layers, and there are {stages} stages{of_chunks}: write E, t for "
            "each layer, L and | between parts, such as Et*15|(t*16|)*2t*14L."
        )
    return counts

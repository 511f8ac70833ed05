"""Layers of pipeline stages: the counts that megatron-core builds, and refusals that name the flags."""

import itertools
from types import SimpleNamespace

import pytest

from slime.utils.models.pipeline_stages import layers_of_chunks, parts_of_layout

FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
LAYOUT = "pipeline_model_parallel_layout"
EMBEDDING, LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
CASES = [
    (61, 4, 1, {LAST: 13}, [16, 16, 16, 13]),
    (78, 4, 1, {FIRST: 18}, [18, 20, 20, 20]),
    (78, 8, 1, {FIRST: 14, LAST: 16}, [14, 8, 8, 8, 8, 8, 8, 16]),
    (8, 2, 2, {}, [2, 2, 2, 2]),
    (10, 3, 2, {FIRST: 2, LAST: 4}, [1, 2, 2, 1, 2, 2]),
    (5, 2, 1, {FIRST: 2, LAST: 3}, [2, 3]),
    (94, 4, 1, {EMBEDDING: True, LOSS: True}, [23, 24, 24, 23]),
    (14, 4, 2, {EMBEDDING: True, LOSS: True}, [1, 2, 2, 2, 2, 2, 2, 1]),
    (36, 1, 1, {}, [36]),
    (78, 8, 1, {LAYOUT: "Et*10|(t*8|)*4(t*12|)*2t*12L"}, [10, 8, 8, 8, 8, 12, 12, 12]),
    (6, 2, 2, {LAYOUT: "Et|tt|tt,|tL"}, [1, 2, 2, 1]),
]


@pytest.mark.parametrize(("layers", "stages", "chunks", "fields", "counts"), CASES)
def test_layers_are_shared_as_the_fields_say(layers, stages, chunks, fields, counts):
    assert layers_of_chunks(layers, stages, chunks, fields) == counts


@pytest.mark.megatron
@pytest.mark.parametrize(("layers", "stages", "chunks", "fields", "counts"), CASES)
def test_megatron_builds_these_layers(layers, stages, chunks, fields, counts):
    from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if LAYOUT in fields:
        layout = PipelineParallelLayerLayout.from_str(fields[LAYOUT], stages)
        found = [[str(kind).count("decoder") for kind in chunk] for rank in layout.layout for chunk in rank]
        by_stage = [sum(counts[stage::stages][c : c + 1]) for stage in range(stages) for c in range(chunks)]
        assert [sum(each) for each in found] == by_stage
        return
    names = (FIRST, LAST, EMBEDDING, LOSS, LAYOUT)
    config = SimpleNamespace(
        **{name: fields.get(name, False if name in (EMBEDDING, LOSS) else None) for name in names},
        num_layers=layers,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
    )
    order = itertools.product(range(chunks) if chunks > 1 else [None], range(stages))
    assert [get_num_layers_to_build(config, chunk, stage) for chunk, stage in order] == counts


@pytest.mark.parametrize(
    ("layers", "stages", "chunks", "fields"),
    [
        (61, 4, 1, {}),
        (61, 4, 1, {LAST: 14}),
        (61, 4, 2, {LAST: 13}),
        (5, 2, 1, {FIRST: 2, LAST: 2}),
        (8, 1, 1, {FIRST: 4, LAST: 4}),
        (8, 2, 1, {FIRST: 8, LAST: 0}),
        (8, 2, 1, {FIRST: 12}),
        (8, 3, 1, {FIRST: 2, EMBEDDING: True}),
    ],
)
def test_stages_that_do_not_add_up_are_refused(layers, stages, chunks, fields):
    with pytest.raises(ValueError, match=r"cannot share like this: .*--decoder-last-pipeline-num-layers"):
        layers_of_chunks(layers, stages, chunks, fields)


@pytest.mark.parametrize("layout", ["Ettt|tttL", "Ett|ttt", "Ett|ttx", ""])
def test_a_layout_that_does_not_hold_the_model_is_refused(layout):
    assert parts_of_layout(layout)
    with pytest.raises(ValueError, match=r"layers in .* the model has 5 layers|cannot share"):
        layers_of_chunks(5, 3, 1, {LAYOUT: layout})

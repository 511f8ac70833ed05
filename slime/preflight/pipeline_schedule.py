"""Megatron's pipeline schedules on paper; a forward or backward pass of a layer takes one unit of time.

Interleaved stages take micro-batches in groups of as many as there are stages; the last one is filled up.
"""

import functools

Unit = tuple[str, int, int]  # forward or backward ("f", "b"), chunk of the stage, micro-batch


def stage_order(stage: int, stages: int, chunks: int, micro_batches: int) -> list[Unit]:
    """The passes of one stage in order: fill the pipeline, one forward and one backward in turn, drain."""
    total = micro_batches * chunks
    warm = min(_warm_up(stage, stages, chunks), total)
    units = [_unit("f", k, stages, chunks) for k in range(warm)]
    for k in range(total - warm):
        units += [_unit("f", warm + k, stages, chunks), _unit("b", k, stages, chunks)]
    return units + [_unit("b", k, stages, chunks) for k in range(total - warm, total)]


def _warm_up(stage: int, stages: int, chunks: int) -> int:
    """Forward passes of a stage before its first backward pass."""
    later = stages - stage - 1
    return later if chunks == 1 else 2 * later + (chunks - 1) * stages


def _unit(kind: str, k: int, stages: int, chunks: int) -> Unit:
    """A stage's k-th forward or backward pass: groups of micro-batches, one chunk after the other."""
    if chunks == 1:
        return kind, 0, k
    turn, place = divmod(k, stages * chunks)
    chunk = place // stages
    return kind, chunk if kind == "f" else chunks - 1 - chunk, turn * stages + place % stages


def run_count(stages: int, chunks: int, micro_batches: int) -> int:
    """Micro-batches that are run, those of idle work among them."""
    return micro_batches if chunks == 1 else -(-micro_batches // stages) * stages


def most_kept(stage: int, stages: int, chunks: int, micro_batches: int) -> float:
    """Micro-batches whose activations a stage keeps at once, counted in whole stages."""
    total = run_count(stages, chunks, micro_batches) * chunks
    return min(_warm_up(stage, stages, chunks) + 1, total) / chunks


@functools.cache
def bubble_share(layers: tuple[int, ...], chunks: int, micro_batches: int) -> float:
    """Share of a step in which stages of these many layers do not work, on average."""
    stages = len(layers)
    count = run_count(stages, chunks, micro_batches)
    pending = [stage_order(stage, stages, chunks, count) for stage in range(stages)]
    done: dict[Unit, float] = {}  # kind, place of the chunk in the whole model, micro-batch -> its end
    free, position = [0.0] * stages, [0] * stages
    while any(position[s] < len(pending[s]) for s in range(stages)):
        for stage, units in enumerate(pending):
            while position[stage] < len(units):
                kind, chunk, batch = units[position[stage]]
                place = chunk * stages + stage
                needs = _needs(kind, place, batch, stages * chunks)
                if any(need not in done for need in needs):
                    break
                free[stage] = max([free[stage], *(done[need] for need in needs)]) + layers[stage] / chunks
                done[kind, place, batch] = free[stage]
                position[stage] += 1
    return 1 - 2 * micro_batches * sum(layers) / stages / max(free)


def _needs(kind: str, place: int, batch: int, places: int) -> list[tuple[str, int, int]]:
    neighbour = place - 1 if kind == "f" else place + 1
    needs = [(kind, neighbour, batch)] if 0 <= neighbour < places else []
    return [*needs, ("f", place, batch)] if kind == "b" else needs

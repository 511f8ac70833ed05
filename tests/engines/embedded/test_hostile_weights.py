"""Weights that no trainer sends: each push is refused by name, and the engine serves on with what it has."""

import asyncio
import json
import os
import time

import pytest
import torch
from engine_under_test import load_model
from hostile_calls import IDS, a_manifest, assert_serves, send

from slime.utils.async_utils import run
from slime.utils.http_utils import HttpError

NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_push_of_weights_that_are_no_numbers_is_refused_by_name(engine, folder, bad):
    state = {name: tensor.clone() for name, tensor in load_model(folder).state_dict().items()}
    state[NAME][-1, -1] = bad
    with engine.published(state, "run:1") as (manifest, _), pytest.raises(HttpError, match=NAME) as error:
        run(engine.control.update_from_shared_memory(manifest))
    assert error.value.status == 400 and "finite" in error.value.body
    assert engine.generate(IDS, max_new_tokens=2).weight_version == "default"


def test_a_push_that_only_overflows_in_the_engine_s_own_precision_is_refused_by_name(engine, folder):
    state = {name: tensor.double() for name, tensor in load_model(folder).state_dict().items()}
    state[NAME][0, 0] = 1e300
    with engine.published(state, "run:1") as (manifest, _), pytest.raises(HttpError, match=NAME):
        run(engine.control.update_from_shared_memory(manifest))
    assert_serves(engine)


def test_a_push_of_integers_in_place_of_weights_is_refused_by_name(engine, folder):
    state = dict(load_model(folder).state_dict())
    state[NAME] = torch.ones_like(state[NAME], dtype=torch.int64)
    with engine.published(state, "run:1") as (manifest, _), pytest.raises(HttpError, match=NAME) as error:
        run(engine.control.update_from_shared_memory(manifest))
    assert error.value.status == 400 and "int64" in error.value.body
    assert_serves(engine)


def test_a_checkpoint_folder_of_weights_that_are_no_numbers_is_refused_by_name(engine, folder, tmp_path):
    from safetensors.torch import load_file, save_file

    state = load_file(folder / "model.safetensors")
    state[NAME][0, 0] = float("nan")
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(HttpError, match=NAME) as error:
        run(engine.control.update_from_disk(str(tmp_path), "run:1"))
    assert error.value.status == 400
    assert engine.generate(IDS, max_new_tokens=2).weight_version == "default"


def test_logits_that_are_no_numbers_fail_the_request_and_the_next_weights_serve_again(engine, folder):
    state = {name: tensor.clone() for name, tensor in load_model(folder).state_dict().items()}
    overflowing = {name: torch.full_like(t, 3e38) if name == NAME else t for name, t in state.items()}
    with engine.published(overflowing, "run:1") as (manifest, _):
        run(engine.control.update_from_shared_memory(manifest))  # finite, every one of them
    for body in ({"input_ids": [[5, 6], [7]]}, {"input_ids": IDS, "stream": True}):
        status, text = send(engine, "generate", body)
        assert status == 422 and "not finite" in text and "run:1" in text
    status, text = send(engine, "generate", {"input_ids": IDS, "sampling_params": {"max_new_tokens": 0}})
    assert status == 200
    with engine.published(state, "default") as (manifest, _):
        run(engine.control.update_from_shared_memory(manifest))
    assert run(engine.control.healthy(30))
    assert_serves(engine)


BAD_FOLDERS = (
    "fifo",
    "fifo as index",
    "index of nonsense",
    "index outside",
    "index of a list",
    "cut",
    "folder",
)


@pytest.mark.parametrize("kind", BAD_FOLDERS)
def test_a_folder_that_holds_no_checkpoint_is_refused_at_once(engine, folder, tmp_path, kind):
    file, index = tmp_path / "model.safetensors", tmp_path / "model.safetensors.index.json"
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "fifo as index":
        os.mkfifo(index)
    elif kind == "folder":
        file.mkdir()
    elif kind == "cut":
        file.write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    else:
        texts = {
            "index of nonsense": "{",
            "index of a list": '{"weight_map": [5]}',
            "index outside": json.dumps({"weight_map": {"a": str(folder / "model.safetensors")}}),
        }
        index.write_text(texts[kind])
    started = time.monotonic()
    status, text = send(engine, "update_weights_from_disk", {"model_path": str(tmp_path)})
    assert status == 400 and str(tmp_path) in text, (status, text)
    assert time.monotonic() - started < 60
    assert_serves(engine)


def test_a_manifest_that_says_nothing_sound_is_a_400(engine):
    stack, sound = a_manifest(engine, 2)
    with stack:
        first = sound["buckets"][0]
        entry = first["tensors"][0]
        for bucket in (
            {**first, "nbytes": 1e999},
            {**first, "nbytes": -5, "tensors": []},
            {**first, "nbytes": "16"},
            {**first, "segment": ["a"]},
            {**first, "segment": "../../etc/passwd"},
            {**first, "segment": "slime-\0"},
            {**first, "checksum": None},
            {**first, "tensors": 5},
            {**first, "tensors": [{**entry, "shape": [2**70]}]},
            {**first, "tensors": [{**entry, "shape": "4"}]},
            {**first, "tensors": [{**entry, "shape": [True]}]},
            {**first, "tensors": [{**entry, "offset": 1e999}]},
            {**first, "tensors": [{**entry, "dtype": []}]},
            {**first, "tensors": [{**entry, "name": 5}]},
            sound["buckets"][1],  # one segment twice
        ):
            changed = {**sound, "buckets": [bucket, sound["buckets"][1]]}
            for nbytes in (sound["nbytes"], 0, bucket["nbytes"]):
                status, text = send(
                    engine,
                    "update_weights_from_shared_memory",
                    json.dumps({**changed, "nbytes": nbytes}).encode(),
                )
                assert status == 400, (bucket, status, text)
    assert_serves(engine)


def test_two_pushes_at_once_leave_the_weights_of_one_of_them(engine, folder):
    state = dict(load_model(folder).state_dict())

    async def push(first, second):
        await asyncio.gather(*(engine.control.update_from_shared_memory(m) for m in (first, second)))

    with engine.published(state, "run:1") as (one, _), engine.published(state, "run:2") as (two, _):
        run(push(one, two))
    assert engine.generate(IDS, max_new_tokens=2).weight_version in ("run:1", "run:2")
    run(engine.control.set_version("default"))

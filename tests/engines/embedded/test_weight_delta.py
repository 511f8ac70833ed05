"""A delta that the engine cannot apply is refused before anything is changed, whoever wrote its folder."""

import json

import pytest
import torch

from slime.engines.embedded.weight_delta import DeltaUpdate
from slime.engines.embedded.weight_update import BadWeights

pytest.importorskip("zstandard")

RECORD = dict(name="a", nbytes=4, itemsize=2, checksum="x", file="f", offset=0, size=3, num_changed=1)


def write(folder, **changes) -> None:
    manifest = dict(version="r:2", base="r:1", encoding="xor", checksum="adler32", files={"f": 3})
    (folder / "weights.json").write_text(json.dumps({**manifest, "tensors": [{**RECORD, **changes}]}))
    (folder / "f").write_bytes(b"abc")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({}, "not a zstd frame"),
        ({"file": "../weights.json"}, "is not one of its files"),
        ({"file": {}}, "unhashable"),
        ({"offset": "a"}, "cannot be interpreted as an integer"),
        ({"size": "a"}, "integer"),
        ({"itemsize": 3}, ""),
    ],
)
def test_a_damaged_delta_is_refused(tmp_path, changes, why):
    write(tmp_path, **changes)
    with pytest.raises(BadWeights, match=f"the delta in .* cannot be applied: .*{why}"):
        DeltaUpdate(tmp_path, "r:1", "r:2")


def test_a_delta_of_other_versions_and_one_of_another_model_are_refused(tmp_path):
    write(tmp_path, size=0)
    with pytest.raises(BadWeights, match="it leads from r:1 to r:2, not from r:0 to r:2"):
        DeltaUpdate(tmp_path, "r:0", "r:2")
    delta = DeltaUpdate(tmp_path, "r:1", "r:2")
    delta.check({"a": torch.zeros(2, dtype=torch.bfloat16)})
    for tensors in ({}, {"a": torch.zeros(2)}, {"a": torch.zeros(3, dtype=torch.bfloat16)}):
        with pytest.raises(BadWeights, match="the delta is made for a of 4 bytes"):
            delta.check(tensors)

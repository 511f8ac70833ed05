"""Checksums notice every flipped bit and manifests refuse to lie about their tensors."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.wire import manifest as m


def slow_checksum(data: bytes) -> int:
    data = data + b"\0" * (-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    return sum(x * (2 * i + 1) for i, x in enumerate(words)) % 2**64


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.tensor(list(data), dtype=torch.uint8)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=400))
def test_the_checksum_equals_the_slow_version(data):
    assert m.byte_checksum(as_tensor(data)) == slow_checksum(data)


def test_the_checksum_equals_the_slow_version_over_several_chunks(monkeypatch):
    monkeypatch.setattr(m, "_CHUNK_WORDS", 16)
    data = bytes(torch.randint(0, 256, (16 * 8 * 3 + 13,)).tolist())
    assert m.byte_checksum(as_tensor(data)) == slow_checksum(data)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=200), st.data())
def test_one_flipped_bit_changes_the_checksum(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    tensor = as_tensor(data)
    before = m.byte_checksum(tensor)
    tensor[bit // 8] ^= 1 << (bit % 8)
    assert m.byte_checksum(tensor) != before


def test_swapped_words_change_the_checksum():
    words = torch.arange(1, 9, dtype=torch.int64)
    swapped = words.flip(0).contiguous()
    assert m.byte_checksum(words.view(torch.uint8)) != m.byte_checksum(swapped.view(torch.uint8))


def test_an_unaligned_view_has_the_same_checksum():
    data = torch.randint(0, 256, (101,), dtype=torch.uint8)
    assert m.byte_checksum(data[3:]) == m.byte_checksum(data[3:].clone())


def test_a_filled_bucket_reads_back_every_tensor():
    tensors = [
        ("a", torch.randn(3, 5)),
        ("b", torch.randn(7).bfloat16()),
        ("c", torch.arange(3)),
        ("s", torch.ones(())),
    ]
    _, nbytes = m.plan_bucket(tensors)
    buffer = torch.full((nbytes,), 255, dtype=torch.uint8)
    bucket = m.fill_bucket("slime-x", buffer, tensors)
    for entry, (name, tensor) in zip(bucket.tensors, tensors, strict=True):
        assert entry.name == name and torch.equal(entry.view(buffer), tensor)
    assert bucket.checksum == m.byte_checksum(buffer)


def make_manifest(version="run:1", **changes):
    tensors = [("a", torch.randn(3, 5)), ("b", torch.randn(7))]
    _, nbytes = m.plan_bucket(tensors)
    bucket = m.fill_bucket("slime-x", torch.zeros(nbytes, dtype=torch.uint8), tensors)
    values = {"version": version, "buckets": (bucket,), "num_tensors": 2, "nbytes": nbytes, **changes}
    return m.WeightManifest(**values)


def test_a_manifest_survives_json():
    manifest = make_manifest()
    assert m.WeightManifest.from_json(manifest.to_json()) == manifest


def test_a_lost_bucket_is_noticed():
    with pytest.raises(ValueError, match="a bucket is missing"):
        make_manifest(buckets=())


def test_a_tensor_beyond_its_bucket_is_refused():
    data = make_manifest().to_json()
    data["buckets"][0]["tensors"][1]["shape"] = [700]
    with pytest.raises(ValueError, match="tensor b ends at byte"):
        m.WeightManifest.from_json(data)


@pytest.mark.parametrize("data", [None, [], {}, {"version": "a"}, {"version": "a", "buckets": [{}]}])
def test_something_that_is_no_manifest_is_refused(data):
    with pytest.raises(ValueError, match="not a weight manifest"):
        m.WeightManifest.from_json(data)


@pytest.mark.gpu
def test_the_checksum_of_a_device_is_that_of_the_host():
    data = torch.randint(0, 256, (3 * 2**20 + 5,), dtype=torch.uint8)
    assert m.byte_checksum(data.cuda()) == m.byte_checksum(data)

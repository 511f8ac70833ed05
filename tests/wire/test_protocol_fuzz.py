"""Whatever JSON comes, the protocol's types read it or raise ValueError with words."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime.wire.manifest import WeightManifest
from slime.wire.protocol import EngineInfo, Generation, SamplingParams, wrong_token_id

numbers = st.one_of(
    st.integers(), st.floats(), st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 1e-320, True])
)
scalars = st.one_of(st.none(), st.booleans(), numbers, st.text(max_size=10))
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


def objects(**plausible):
    """Objects with these fields, each as it should be, or anything, or missing."""
    return st.fixed_dictionaries(
        {}, optional={name: st.one_of(value, anything) for name, value in plausible.items()}
    )


def read(cls, data, *more):
    """None: it was refused, and in few words."""
    try:
        return cls.from_json(data, *more)
    except ValueError as error:
        assert 0 < len(str(error)) < 3000
        return None


FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
sampling = objects(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(-1, 50),
    min_p=st.floats(0, 1),
    max_new_tokens=st.integers(0, 9),
    min_new_tokens=st.integers(0, 9),
    stop=st.lists(st.text(max_size=3), max_size=2),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=2),
    ignore_eos=st.booleans(),
    sampling_seed=st.integers(),
    n=st.integers(1, 3),
)


@FUZZ
@given(data=st.one_of(sampling, anything))
def test_sampling_params_that_are_read_are_written_and_read_the_same(data):
    params = read(SamplingParams, data)
    if params is not None:
        assert SamplingParams.from_json(json.loads(json.dumps(params.to_json()))) == params
        assert params.temperature >= 0 and -(2**63) <= (params.sampling_seed or 0) < 2**63


triples = st.lists(st.tuples(st.floats(-9, 0), st.integers(0, 99), st.none()).map(list), max_size=3)
spans = st.lists(
    objects(version=st.text(max_size=3), start=st.integers(0, 3), end=st.integers(0, 3)), max_size=2
)
generations = objects(
    text=st.text(max_size=5),
    output_ids=st.lists(st.integers(0, 99), max_size=3),
    meta_info=objects(
        id=st.text(max_size=3),
        finish_reason=objects(type=st.sampled_from(["stop", "length", "abort"])),
        output_token_logprobs=triples,
        weight_version=st.text(max_size=3),
        weight_versions=spans,
        prompt_tokens=st.integers(0, 9),
        cached_tokens=st.integers(0, 9),
    ),
)


@FUZZ
@given(data=st.one_of(generations, anything))
def test_an_answer_is_a_generation_or_a_value_error(data):
    made = read(Generation, data)
    if made is not None:
        assert all(type(i) is int for i in made.ids) and isinstance(made.text, str)
        assert made.log_probs is None or len(made.log_probs) == len(made.ids)


manifests = objects(
    version=st.text(max_size=3),
    num_tensors=st.integers(0, 2),
    nbytes=st.integers(0, 64),
    buckets=st.lists(
        objects(
            segment=st.text(max_size=5),
            nbytes=st.integers(0, 64),
            checksum=st.integers(0, 2**64),
            tensors=st.lists(
                objects(
                    name=st.text(max_size=3),
                    offset=st.integers(0, 32),
                    dtype=st.sampled_from(["float32", "bfloat16"]),
                    shape=st.lists(st.integers(0, 4), max_size=2),
                ),
                max_size=2,
            ),
        ),
        max_size=2,
    ),
)


@FUZZ
@given(data=st.one_of(manifests, anything))
def test_a_manifest_is_read_or_a_value_error(data):
    manifest = read(WeightManifest, data)
    if manifest is not None:
        assert WeightManifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


infos = objects(
    engine=st.just("embedded"),
    version=st.text(max_size=6),
    model_path=st.text(max_size=3),
    vocab_size=st.integers(1, 9),
    context_length=st.integers(1, 9),
    tp_size=st.integers(1, 3),
)


@FUZZ
@given(server=st.one_of(infos, anything), model=st.one_of(infos, st.none(), anything))
def test_an_engine_describes_itself_or_it_is_a_value_error(server, model):
    info = read(EngineInfo, server, model)
    if info is not None:
        assert info.num_ranks >= 1 and info.transports
        assert info.vocab_size is None or info.vocab_size > 0


@pytest.mark.parametrize(
    ("ids", "vocab", "wrong"),
    [
        ([], 5, None),
        ([0, 4], 5, None),
        ([0, 5], 5, "5"),
        ([0, 5], None, None),
        ([3, -1], None, "-1"),
        ([3, 1.0], 5, "1.0"),
        ([3, "1"], 5, "'1'"),
        ([3, [1]], 5, "[1]"),
        ([True], 5, "True"),
        ([None], 5, "None"),
    ],
)
def test_the_first_wrong_id_is_found(ids, vocab, wrong):
    assert wrong_token_id(ids, vocab) == wrong

"""Families of transformers on the FSDP trainer: exact over packed documents, by whatever way they need."""

import copy
import json

import pytest
import torch
from torch import nn
from trainer_helpers import backend_of, trainer_args
from transformers import AutoModelForCausalLM

from slime.algorithms.attention_variants import Variant, sees
from slime.backends.attention.documents import PackedDocuments
from slime.backends.attention.packed_documents import packed_attention
from slime.backends.base import MicroBatch
from slime.backends.fsdp import backend as fsdp_backend
from slime.backends.fsdp import families, loading
from slime.backends.shared.microbatch import build_micro_batches
from slime.catalog.families import VERIFIED
from slime.cli.verify_model import shrink, survey
from slime.cli.verify_model.cases import buffers_of, documents
from slime.utils.files.safetensors_files import all_files, tensor_names

pytestmark = pytest.mark.usefixtures("process_group")

# Which way each takes; one of every kind of attention, state and output layer.
SAMPLED = {
    "qwen3_next": survey.BY_STATE,
    "qwen3_5_text": survey.BY_STATE,
    "minimax_m2": survey.PACKED,
    "gpt_oss": survey.PACKED,  # sinks, sliding window
    "gemma2": survey.PACKED,  # soft caps
    "gemma3_text": survey.PACKED,
    "mixtral": survey.PACKED,
    "granite": survey.PACKED,  # scaled logits
    "llama4_text": survey.PACKED,  # chunks
    "phi": survey.PACKED,  # an output layer with a bias
    "olmo3": survey.PACKED,
    "bloom": survey.PADDED,
    "falcon_h1": survey.BY_STATE,  # a buffer of each layer that the decoder computes
}
# Families with buffers of different kinds that no file holds; the slow test compares those of all.
WITH_BUFFERS = (
    *("falcon_h1", "minimax", "gemma3n_text", "gemma4_text", "apertus", "ctrl", "codegen", "xglm", "gptj"),
    *("recurrent_gemma", "deepseek_v4", "qwen3_next"),
)


@pytest.mark.parametrize("kind", SAMPLED)
def test_a_family_trains_exactly(kind, tmp_path):
    row = survey.examine(kind, tmp_path)
    assert (row.result, row.how) == (survey.EXACT, SAMPLED[kind]), row.note


@pytest.mark.slow
def test_every_family_of_transformers_trains_exactly_or_is_refused(tmp_path):
    wrong = []
    for kind in survey.all_kinds():
        row = survey.examine(kind, tmp_path / kind)
        listed = kind in VERIFIED.get(row.how, ())
        if row.result == survey.DIFFERS or listed != (row.result == survey.EXACT):
            wrong.append(f"{kind}: {row.result}, {row.how} {row.note}")
    assert not wrong


def differing_buffers(kind):
    """Buffers of a small model of the family that are not those that transformers computes."""
    layers, changes = survey.DEFAULTS.get(kind, (2, {}))
    config = shrink.shrink(survey._changed(_config(kind), changes), layers=layers)
    expected = buffers_of(AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=torch.float32))
    with loading.without_storage():
        model = nn.ModuleDict({"lm": families.build(config)})
    assert all(parameter.is_meta for parameter in model.parameters())
    loading.allocate(model, torch.device("cpu"))
    found = buffers_of(model["lm"])
    assert expected.keys() == found.keys()
    return [name for name, buffer in expected.items() if not torch.equal(buffer, found[name])]


@pytest.mark.parametrize("kind", WITH_BUFFERS)
def test_buffers_are_those_that_transformers_computes(kind):
    assert differing_buffers(kind) == []


@pytest.mark.slow
def test_buffers_of_all_verified_families_are_those_that_transformers_computes():
    kinds = [kind for how in VERIFIED.values() for kind in how]
    assert {kind: wrong for kind in kinds if (wrong := differing_buffers(kind))} == {}


def test_the_trainer_refuses_a_family_that_was_not_compared(tmp_path, monkeypatch):
    """The config of a model of the hub is known to the trainer first."""
    model = small_model(tmp_path / "model", "qwen3")
    monkeypatch.setattr(fsdp_backend, "is_verified", lambda kind, backend: False)
    with pytest.raises(ValueError, match=r"is a qwen3: .* was never compared .* --allow-unverified-model"):
        backend_of(trainer_args(model))
    backend_of(trainer_args(model, allow_unverified_model=True))


def test_what_sees_or_hears_in_a_small_text_model_is_small_too():
    from transformers import CONFIG_MAPPING

    config = shrink.shrink(CONFIG_MAPPING["phi4_multimodal"](), layers=2)
    with torch.device("meta"):
        lm = families.build(config)
    assert sum(weight.numel() for weight in lm.parameters()) < 1e8  # 9e8 with all their layers


def small_model(folder, kind="qwen3_next"):
    from transformers import CONFIG_MAPPING

    config = shrink.shrink(CONFIG_MAPPING[kind](), layers=2)
    shrink.build(config, folder, "")
    return folder


def test_no_state_passes_from_one_document_to_the_next(tmp_path):
    """Other tokens in one document change nothing of its neighbours, bit for bit."""
    backend = backend_of(trainer_args(small_model(tmp_path / "model", "qwen3_5_text")))
    batch = documents(512)

    def log_probs():
        (mb,) = build_micro_batches(batch, [[0, 2, 3]])
        return backend.log_probs([mb]).log_probs

    before = log_probs()
    batch["tokens"][0] = (batch["tokens"][0] + 7) % 512
    after = log_probs()
    assert not torch.equal(before[0], after[0])
    assert all(torch.equal(a, b) for a, b in zip(before[1:], after[1:], strict=True))


def test_layers_with_a_state_keep_documents_on_one_rank(tmp_path):
    with pytest.raises(ValueError, match=r"--context-parallel-size 2: qwen3_next has layers that need all"):
        model = small_model(tmp_path / "model")
        lm = loading.empty_model(model)
        assert families.needs_whole_documents(lm)
        backend = backend_of(trainer_args(model))
        backend.args = trainer_args(model, context_parallel_size=2)
        backend._build_model()


@pytest.mark.parametrize(
    "variant",
    [
        Variant(window=3),
        Variant(chunk=4),
        Variant(softcap=2.0, window=5),
        Variant(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
        Variant(sinks=torch.tensor([0.5, -1.0, 2.0, 0.0]), softcap=3.0, window=2),
    ],
)
def test_variants_of_attention_equal_the_obvious_version(variant):
    torch.manual_seed(0)
    lengths = [5, 1, 9, 8]
    query, key, value = (torch.randn(sum(lengths), heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    found = packed_attention(query, key, value, PackedDocuments.from_lengths(lengths), variant=variant)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        for head in range(4):
            scores = query[rows, head] @ key[rows, head // 2].T * 8**-0.5
            if variant.softcap is not None:
                scores = variant.softcap * torch.tanh(scores / variant.softcap)
            for i in range(length):
                for j in range(length):
                    near = variant.window is None or i - j < variant.window
                    together = variant.chunk is None or i // variant.chunk == j // variant.chunk
                    if j > i or not near or not together:
                        scores[i, j] = float("-inf")
            weights = scores.exp()
            sink = 0.0 if variant.sinks is None else variant.sinks[head].double().exp()
            expected = weights / (weights.sum(-1, keepdim=True) + sink) @ value[rows, head // 2]
            torch.testing.assert_close(found[rows, head], expected, rtol=1e-5, atol=1e-6)
        start += length


def test_a_window_counts_from_the_end_of_a_prefix():
    seen = sees(2, 4, Variant(window=2), torch.device("cpu"))
    assert seen.tolist() == [[False, True, True, False], [False, False, True, True]]


def test_the_text_model_of_a_reader_keeps_names_and_other_parts_of_its_checkpoint(tmp_path):
    """Qwen3.5 checkpoints nest the text model beside a vision tower; engines know the nested names."""
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    whole = CONFIG_MAPPING["qwen3_5"]()
    text = shrink.shrink(whole, layers=2)
    vision = dict(
        depth=1, hidden_size=32, num_heads=2, intermediate_size=32, out_hidden_size=text.hidden_size
    )
    vision |= dict(num_position_embeddings=16, patch_size=4)
    parts = {"text_config": text.to_dict(), "vision_config": whole.vision_config.to_dict() | vision}
    config = type(whole).from_dict(whole.to_dict() | parts)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "hub")
    hub = {name for file in all_files(tmp_path / "hub") for name in tensor_names(file)}
    backend = backend_of(trainer_args(tmp_path / "hub"))
    pushed = {name for bucket in backend.export() for name, _ in bucket}
    assert pushed <= hub and all(".visual." in name for name in hub - pushed)
    backend.save_hf(tmp_path / "saved")
    assert {name for file in all_files(tmp_path / "saved") for name in tensor_names(file)} == hub
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["model_type"] == "qwen3_5"


def test_an_output_layer_that_is_unknown_is_refused(tmp_path, monkeypatch):
    with torch.device("meta"):
        lm = families.build(shrink.shrink(_config("llama"), layers=1))
    assert families.output_layer(lm) == families.OutputLayer()
    forward = lm.forward
    monkeypatch.setattr(lm, "forward", lambda **options: _squared(forward(**options)))
    with pytest.raises(ValueError, match="changes its logits in a way"):
        families.output_layer(lm)


def _config(kind):
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]()


def _squared(output):
    output.logits = output.logits.square()
    return output


def test_an_encoder_is_refused():
    with pytest.raises(ValueError, match="bert is no decoder"), torch.device("meta"):
        families.build(_config("bert"))


def test_padded_batches_keep_the_order_of_tokens():
    mb: MicroBatch = build_micro_batches(documents(512), [[0, 1, 2]])[0]

    class Echo:
        base_model = None
        model_type = "echo"

        def __init__(self):
            self.config = self
            self._attn_implementation = "sdpa"

        def get_text_config(self):
            return self

        def model(self, input_ids, attention_mask, use_cache):
            hidden = torch.where(attention_mask.bool(), input_ids, -1)
            return type("Output", (), {"last_hidden_state": hidden[..., None]})

    lm = Echo()
    lm.base_model = lm
    assert families.run_whole(lm, mb)[:, 0].tolist() == mb.input_ids[0].tolist()

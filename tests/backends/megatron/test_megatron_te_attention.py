"""TransformerEngine's attention, by fakes, is used only where it computes what ours does."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("megatron.core")

from megatron_families import make_checkpoint
from megatron_helpers import in_processes, make_family, megatron_args, training_step

from slime.backends.megatron.config import read_hf_config, transformer_config
from slime.backends.megatron.modules import te_attention
from slime.backends.megatron.modules.layers import PackedCoreAttention
from slime.backends.megatron.modules.mla import MLACoreAttention

pytestmark = pytest.mark.megatron
CPU, GPU = torch.device("cpu"), torch.device("cuda")
GROUPS = SimpleNamespace(cp=None, tp=None)


class FakeTransformerEngineAttention(torch.nn.Module):
    """Built and called as TEDotProductAttention is; computes document by document."""

    def __init__(self, config, layer_number, attn_mask_type, attention_type, **options):
        super().__init__()
        known = {
            "softmax_scale",
            "k_channels",
            "v_channels",
            "cp_comm_type",
            "pg_collection",
            "attention_dropout",
        }
        assert set(options) <= known, options
        assert config.num_query_groups % config.tensor_model_parallel_size == 0
        self.scale = options["softmax_scale"]
        # The real one keeps a state of its own for low precision.
        self.register_buffer("state_of_its_own", torch.zeros(1))

    def forward(
        self, query, key, value, attention_mask, attn_mask_type, attention_bias=None, packed_seq_params=None
    ):
        assert (
            attention_mask is None
            and attn_mask_type.name == "causal"
            and packed_seq_params.qkv_format == "thd"
        )
        bounds = packed_seq_params.cu_seqlens_q
        assert bounds.dtype == torch.int32 and packed_seq_params.max_seqlen_q == int(bounds.diff().max())
        times = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(times, dim=1) for x in (key, value))
        outs = [
            self.document(*(x[start:end].transpose(0, 1) for x in (query, key, value))).transpose(0, 1)
            for start, end in self.documents(bounds.tolist())
        ]
        return torch.cat(outs).flatten(1)

    def documents(self, bounds):
        return list(itertools.pairwise(bounds))

    def document(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)


class FakeThatIgnoresDocuments(FakeTransformerEngineAttention):
    def documents(self, bounds):
        return [(bounds[0], bounds[-1])]


class FakeThatSeesTheFuture(FakeTransformerEngineAttention):
    def document(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=self.scale)


class FakeThatIgnoresTheScale(FakeTransformerEngineAttention):
    def document(self, query, key, value):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


class FakeWithAWrongGradient(FakeTransformerEngineAttention):
    def document(self, query, key, value):
        return super().document(query, key.detach() + 0 * key, value)


class FakeWithNotANumber(FakeTransformerEngineAttention):
    def document(self, query, key, value):
        return super().document(query, key, value) * float("nan")


class FakeThatRaises(FakeTransformerEngineAttention):
    def document(self, query, key, value):
        raise Exception("No dot product attention support for the provided inputs!")


class FakeOfHalfTheWidth(FakeTransformerEngineAttention):
    def forward(self, *parts, **options):
        return super().forward(*parts, **options).chunk(2, dim=1)[0]


WRONG = {
    FakeThatIgnoresDocuments: "its output is off by",
    FakeThatSeesTheFuture: "its output is off by",
    FakeThatIgnoresTheScale: "its output is off by",
    FakeWithAWrongGradient: "its gradient of the key is off by",
    FakeWithNotANumber: "its output is off by nan",
    FakeThatRaises: r"it failed on a small batch \(Exception: No dot product attention support",
    FakeOfHalfTheWidth: "it failed on a small batch",
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("te")
    return {"dense": make_family(root / "dense", "qwen3"), "mla": make_checkpoint(root, "deepseek_v3")[0]}


@pytest.fixture(autouse=True)
def no_groups(monkeypatch):
    """Attention alone needs no other rank."""
    kinds = "slime.backends.megatron.modules.layers.ProcessGroupCollection.use_mpu_process_groups"
    monkeypatch.setattr(kinds, lambda **options: GROUPS)


def settings(folder, **changes):
    args = megatron_args(folder, **{"compile": False, "dtype": "bfloat16", **changes})
    return args, transformer_config(args, read_hf_config(folder), torch.bfloat16, CPU)


@pytest.fixture
def anywhere(monkeypatch):
    """As if this were a GPU: what is tried is tried on the CPU."""
    monkeypatch.setattr(te_attention, "why_unfit", lambda *facts: None)


@pytest.mark.parametrize("kind", ["dense", "mla"])
@pytest.mark.parametrize("choice", ["auto", "flash"])
def test_kernel_that_agrees_is_used(folders, anywhere, kind, choice):
    args, config = settings(folders[kind], attention_backend=choice)
    found = te_attention.choose_attention(args, config, CPU, FakeTransformerEngineAttention)
    assert issubclass(found, te_attention.TransformerEngineAttention)
    assert issubclass(found, MLACoreAttention if kind == "mla" else PackedCoreAttention)
    assert found.kernel is FakeTransformerEngineAttention
    assert config.attention_backend.name == choice


@pytest.mark.parametrize("kind", ["dense", "mla"])
@pytest.mark.parametrize("fake", WRONG, ids=lambda fake: fake.__name__)
def test_kernel_that_is_wrong_is_refused_and_never_chosen_by_itself(folders, anywhere, kind, fake, caplog):
    caplog.set_level("INFO", logger=te_attention.__name__)
    args, config = settings(folders[kind], attention_backend="fused", strict=True)
    with pytest.raises(ValueError, match=f"--attention-backend is fused.*{WRONG[fake]}.*use auto or local"):
        te_attention.choose_attention(args, config, CPU, fake)
    args, config = settings(folders[kind])
    ours = MLACoreAttention if kind == "mla" else PackedCoreAttention
    assert te_attention.choose_attention(args, config, CPU, fake) is ours
    assert "attention: slime's own, because" in caplog.text


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({}, CPU, "it runs on GPUs only"),
        ({"cp": 2}, GPU, "with --context-parallel-size above 1"),
        ({"compile": True}, GPU, "layers are compiled as a whole"),
        ({}, GPU, "transformer_engine is not installed"),
    ],
)
def test_where_it_cannot_be_used_the_reason_is_given(folders, monkeypatch, caplog, changes, device, reason):
    monkeypatch.setattr(te_attention, "installed_te_attention", lambda: None)
    args, config = settings(folders["dense"], attention_backend="flash", **changes)
    assert te_attention.choose_attention(args, config, device) is PackedCoreAttention
    assert re.search(f"--attention-backend is flash.*{reason}.*slime's own attention is used", caplog.text)
    with pytest.raises(ValueError, match=reason):
        te_attention.choose_attention(args.replace(strict=True), config, device)
    args = args.replace(attention_backend="auto")
    assert te_attention.choose_attention(args, config, device) is PackedCoreAttention


def test_it_takes_16_bit_numbers_only(folders):
    args, config = settings(folders["dense"], attention_backend="flash", dtype="float32")
    config.params_dtype = torch.float32
    assert "float32 is none of its 16-bit types" in te_attention.why_unfit(args, config, GPU)


def test_wide_dense_layers_keep_what_compiles_unless_a_kernel_is_asked_for(folders):
    args, config = settings(folders["dense"], compile=None)
    config.hidden_size = 4096
    assert "compiled as a whole" in te_attention.why_unfit(args, config, GPU)
    args = args.replace(attention_backend="flash")
    assert te_attention.why_unfit(args, config, GPU) is None


def test_local_never_looks_for_it(folders, monkeypatch):
    monkeypatch.setattr(te_attention, "why_unfit", lambda *facts: pytest.fail("it was looked for"))
    args, config = settings(folders["dense"], attention_backend="local")
    assert te_attention.choose_attention(args, config, GPU) is PackedCoreAttention


def _whole_model(rank, world_size, model, fake_name):
    """Log-probs and state of a model with the fake in every layer, and with our attention."""
    from trainer_helpers import random_samples

    from slime.backends.megatron import create_backend

    te_attention.why_unfit = lambda *facts: None
    fake = globals()[fake_name]
    # Wrong on one rank only: all ranks must take the same attention.
    te_attention.installed_te_attention = lambda: fake if rank else FakeTransformerEngineAttention
    found = {}
    for choice in ("local", "auto"):
        args = megatron_args(model, tp=2, attention_backend=choice, lr=0.1)
        backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
        metrics = training_step(backend, args, random_samples(4, 2, vocab=127)).run().summary
        layer = backend.model[0].module.decoder.layers[0].self_attention.core_attention
        found[choice] = {
            "norm": metrics["train/grad_norm"],
            "loss": metrics["train/loss"],
            "keys": sorted(backend.model[0].module.state_dict()),
            "kind": type(layer).__name__,
        }
    return found


def test_model_with_it_trains_as_with_ours_and_saves_the_same_tensors(folders, tmp_path):
    found = in_processes(2, _whole_model, tmp_path, folders["dense"], "FakeTransformerEngineAttention")
    ours, theirs = found["local"], found["auto"]
    assert (ours["kind"], theirs["kind"]) == ("PackedCoreAttention", "TransformerEnginePackedCoreAttention")
    assert theirs["keys"] == ours["keys"]
    assert theirs["norm"] == pytest.approx(ours["norm"], rel=1e-5) and ours["norm"] > 0
    assert theirs["loss"] == pytest.approx(ours["loss"], abs=1e-6)


def test_one_rank_that_refuses_it_decides_for_all(folders, tmp_path):
    found = in_processes(2, _whole_model, tmp_path, folders["dense"], "FakeThatIgnoresDocuments")
    assert found["auto"]["kind"] == "PackedCoreAttention"

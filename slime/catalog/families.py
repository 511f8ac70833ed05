"""Model families, and which part of slime trains or serves them (docs/model_families.md)."""

from collections.abc import Iterator

from slime.catalog.backends import BACKENDS
from slime.catalog.vision import VISION_FAMILIES
from slime.utils.machine.own_command import as_typed

PACKED, BY_STATE, PADDED = "packed", "packed, states by document", "padded"

_PACKED = """
afmoe apertus arcee aria_text axk1 beam bitnet cohere cohere2 cohere2_moe ctrl cwm deepseek_v2
deepseek_v3 diffllama dots1 ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo flint fuyu gemma gemma2
gemma3 gemma3_text gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant
gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text hunyuan_v1_dense
hunyuan_v1_moe hy_v3 hyperclovax jais2 jetmoe kolibri1 laguna lfm2 llama llama4 llama4_text mellum
mimo_v2_flash minicpm3 minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral moshi
moss_transcribe_diarize nanochat nemotron olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
qwen2_moe qwen3 qwen3_moe seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
_BY_STATE = """
bailing_hybrid falcon_h1 jamba kimi_linear olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_next
"""
_PADDED = """
axk2 bamba biogpt bloom codegen deepseek_v32 deepseek_v4 falcon falcon_mamba git glm_moe_dsa gpt_neo
gpt_neox_japanese gptj granitemoehybrid hy_v4 inkling_text mamba minimax mpt openai-gpt phi4_multimodal
recurrent_gemma rwkv stablelm xglm
"""
# Types that are exact, by how documents run (`slime verify-model --families all`).
VERIFIED: dict[str, tuple[str, ...]] = {
    how: tuple(names.split()) for how, names in ((PACKED, _PACKED), (BY_STATE, _BY_STATE), (PADDED, _PADDED))
}
# Types whose architecture SGLang has a model of, not counting its use of transformers' own.
SGLANG_VERSION = "0.5.23"
_SGLANG = """
afmoe apertus arcee beam cohere cohere2 cohere2_moe deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4
ernie4_5_moe exaone4 exaone_moe falcon_h1 falcon_mamba gemma gemma2 gemma3 gemma3_text gemma3n
gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_assistant glm4 glm4_moe glm4_moe_lite
glm_moe_dsa gpt-sw3 gpt2 gpt_bigcode gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
granitemoehybrid granitemoeshared hrm_text hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 kimi_k2
kimi_linear laguna lfm2 llama llama4 llama4_text mamba mellum mimo mimo_v2_flash minicpm3 minimax_m2
ministral3 mistral mixtral olmo olmo2 olmoe opt persimmon phi phi3 qwen2 qwen2_5_vl qwen2_moe qwen3
qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl stablelm starcoder2
""".split()  # noqa: SIM905 - one name per line would fill a screen
# Types that tests of the embedded engine serve, besides those with images.
EMBEDDED = (
    *("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma2", "gemma4_text", "deepseek_v3"),
    *("llama4_text", "minimax_m2"),
)
# Types that were trained on a GPU, and by which trainer (docs/performance.md); all others on a CPU alone.
SEEN_ON_H200 = {
    "qwen3": "both trainers, both engines",
    "qwen3_moe": "both trainers",
    "glm4_moe": "FSDP",
}


def family_rows() -> Iterator[tuple[str, ...]]:
    """Yield family, FSDP, Megatron, embedded engine, SGLang, images and where it was seen, as texts."""
    how = {name: way for way, names in VERIFIED.items() for name in names}
    built = BACKENDS["megatron"].families or ()
    for name in sorted({*how, *built, *VISION_FAMILIES}):
        images = name in VISION_FAMILIES
        served = name in EMBEDDED or images
        yield (
            name,
            how.get(name, PACKED if images else "-"),
            "yes" if name in built else "-",
            "tested" if served else "untested" if how.get(name) == PACKED else "-",
            "yes" if name in _SGLANG else "-",
            "yes" if images else "-",
            f"H200: {SEEN_ON_H200[name]}" if name in SEEN_ON_H200 else "CPU",
        )


def is_verified(model_type: str, backend: str) -> bool:
    """Return whether tests show that trainer `backend` matches transformers for this model type."""
    built = BACKENDS[backend].families
    if built is not None:
        return model_type in built
    return model_type in VISION_FAMILIES or any(model_type in kinds for kinds in VERIFIED.values())


def refusal(path: object, model_type: str) -> str:
    """Return the error for a model of a family that was not compared."""
    return (
        f"{path} is a {model_type}: slime's training of this family was never compared with "
        "transformers, so its numbers may be wrong. Compare it with "
        f"`{as_typed('verify-model', '--hf-checkpoint', path)}`; if all numbers agree, add "
        "--allow-unverified-model."
    )

"""`slime probe` names planted faults of a server, and finds none where there are none."""

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from aiohttp import web
from engine_under_test import load_model, served_by_sglang
from patience import PATIENCE_S
from safetensors.torch import load_file, save_file
from tiny_model import make_tiny_model

from slime.cli.probe import main
from slime.engines.embedded.__main__ import _make_server, parse
from slime.utils.async_utils import run
from slime.utils.processing_utils import load_tokenizer

TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "given", init_std=0.2)


@pytest.fixture(scope="module")
def adapter(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    make_adapter(model, folder / "step-1", seed=1)
    return make_adapter(model, folder / "step-2", seed=2)


def make_adapter(model: Path, folder: Path, seed: int) -> Path:
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    peft.get_peft_model(load_model(model), config).save_pretrained(folder)
    return folder


def changed(model: Path, folder: Path, change=None, **config) -> Path:
    """A copy of the model folder with other tensors or settings."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    if change is not None:
        change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | config))
    return folder


def merged(model: Path, adapter: Path, folder: Path, scale: float = 2.0, *, kinds=tuple(TARGETS)) -> Path:
    """A model with an adapter in its weights; lora_alpha / r is 2."""
    factors = load_file(adapter / "adapter_model.safetensors")

    def add(tensors):
        for name, a in factors.items():
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if "lora_A" in name and layer.rpartition(".")[2] in kinds:
                tensors[f"{layer}.weight"] += scale * factors[name.replace("lora_A", "lora_B")] @ a

    return changed(model, folder, add)


def exchange(one: str, two: str):
    def change(tensors):
        for name in [name for name in tensors if one in name]:
            other = name.replace(one, two)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def template(model: Path, folder: Path, old: str, new: str) -> Path:
    shutil.copytree(model, folder)
    file = folder / "chat_template.jinja"
    file.write_text(file.read_text().replace(old, new))
    return folder


@contextlib.contextmanager
def served(model: Path) -> Iterator[str]:
    """The embedded engine in this process, which starts sooner than one of its own."""

    async def start() -> web.AppRunner:
        flags = ["--model-path", str(model), "--device", "cpu", "--dtype", "float32"]
        flags += ["--max-running-requests", "8", "--max-total-tokens", "4096"]
        runner = web.AppRunner(_make_server(parse(flags)).make_app())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = run(start())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        run(runner.cleanup())


# What the server serves instead, the flags of the probe, and words of the diagnosis.
FAULTS = {
    "no adapter": (lambda m, a, f: m, "adapter", "serves the model without the adapter."),
    "wrong adapter": (lambda m, a, f: merged(m, a.parent / "step-1", f), "adapter", "step-1."),
    "adapter twice": (lambda m, a, f: merged(m, a, f, 4.0), "adapter", "applies the adapter twice"),
    "no alpha": (lambda m, a, f: merged(m, a, f, 1.0), "adapter", "ignores the adapter's lora_alpha."),
    "adapter in part": (
        lambda m, a, f: merged(m, a, f, kinds=("q_proj", "v_proj")),
        "adapter",
        "does not apply the adapter to down_proj.",
    ),
    "stale version": (lambda m, a, f: make_tiny_model(f, seed=5, init_std=0.2), "other", "serves {other}."),
    "swapped tensors": (
        lambda m, a, f: changed(m, f, exchange("gate_proj", "up_proj")),
        "",
        "has mlp.gate_proj.weight and mlp.up_proj.weight exchanged in all layers.",
    ),
    "swapped in one layer": (
        lambda m, a, f: changed(m, f, exchange("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")),
        "",
        "k_proj.weight and self_attn.v_proj.weight exchanged in layer 1.",
    ),
    "swapped layers": (
        lambda m, a, f: changed(m, f, exchange("layers.0.", "layers.1.")),
        "",
        "has layers 0 and 1 exchanged.",
    ),
    "wrong rope": (
        lambda m, a, f: changed(m, f, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "",
        "rope_theta 1000000 instead of 10000.",
    ),
    "wrong template": (
        lambda m, a, f: template(m, f, "assistant\n", "assistant "),
        "",
        "Fault in chat template",
    ),
    "longer template": (lambda m, a, f: template(m, f, "assistant", "bot"), "", "Fault in chat template"),
    "a broken tensor": (
        lambda m, a, f: changed(m, f, lambda t: t["model.layers.1.mlp.down_proj.weight"].mul_(-3)),
        "",
        "no known fault gives these numbers",
    ),
}
QUICK = ("wrong adapter",)


def words_of(name: str, model: Path, adapter: Path, folder: Path) -> tuple[Path, list[str], str]:
    make, flag, said = FAULTS[name]
    held = make(model, adapter, folder / "held")
    flags = {"adapter": ["--adapter", str(adapter)], "other": ["--other", str(held)], "": []}[flag]
    return held, ["--model", str(model), *flags], said.format(other=held)


@pytest.mark.parametrize(
    "name", [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAULTS]
)
def test_planted_faults_are_named(name, model, adapter, tmp_path, capsys):
    held, flags, said = words_of(name, model, adapter, tmp_path)
    with served(held) as url:
        assert main([url, *flags]) == 1
    diagnosis = capsys.readouterr().out.splitlines()[-1]
    assert diagnosis.startswith("Diagnosis: ") and said in diagnosis


# Weights that a server can be given; the other faults need a server of their own.
IN_WEIGHTS = ("no adapter", "wrong adapter", "no alpha", "stale version", "swapped tensors", "swapped layers")


def load_from(url: str, model: Path) -> None:
    """Let a real SGLang server load other weights, as a weight push from disk does."""
    body = json.dumps({"model_path": str(model)}).encode()
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/update_weights_from_disk", body, kind)
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        assert json.load(answer)["success"]


@pytest.mark.sglang
def test_planted_faults_of_a_real_sglang_server_are_named(model, adapter, tmp_path, capsys):
    with served_by_sglang(model, tmp_path / "engine.log") as url:
        assert main([url, "--model", str(model)]) == 0
        assert capsys.readouterr().out.endswith("with these weights; nothing differs.\n")
        for name in IN_WEIGHTS:
            folder = tmp_path / name.replace(" ", "-")
            folder.mkdir()
            held, flags, said = words_of(name, model, adapter, folder)
            load_from(url, held)
            assert main([url, *flags]) == 1
            diagnosis = capsys.readouterr().out.splitlines()[-1]
            assert diagnosis.startswith("Diagnosis: ") and said in diagnosis, name
        load_from(url, merged(model, adapter, tmp_path / "right"))
        assert main([url, "--model", str(model), "--adapter", str(adapter)]) == 0


@pytest.mark.sglang
@pytest.mark.parametrize("name", ["wrong rope", "wrong template"])
def test_a_real_sglang_server_of_another_configuration_is_named(name, model, adapter, tmp_path, capsys):
    held, flags, said = words_of(name, model, adapter, tmp_path)
    with served_by_sglang(held, tmp_path / "engine.log") as url:
        assert main([url, *flags]) == 1
    diagnosis = capsys.readouterr().out.splitlines()[-1]
    assert diagnosis.startswith("Diagnosis: ") and said in diagnosis


def test_a_server_of_the_right_weights_and_adapter_passes(model, adapter, tmp_path, capsys):
    with served(merged(model, adapter, tmp_path / "held")) as url:
        assert main([f"{url}/v1", "--model", str(model), "--adapter", str(adapter)]) == 0
    said = capsys.readouterr().out
    assert "DIFFERENT" not in said and said.count(" ok ") == 8
    assert said.endswith("the server computes with these weights with this adapter; nothing differs.\n")


def test_a_server_that_is_not_there_is_an_error_with_its_address(model, capsys):
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:9", "--model", str(model)])
    assert "http://127.0.0.1:9 cannot be probed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["http://127.0.0.1:9", "--model", str(model.parent)])
    assert "there is no config.json" in capsys.readouterr().err


@contextlib.contextmanager
def served_like_vllm(model: Path, names=("given",), ignores_prompt=False) -> Iterator[str]:
    """The endpoints of vLLM, in its form: it stands for a server that is not here."""
    lm, tokenizer = load_model(model), load_tokenizer(str(model))

    @torch.inference_mode()
    def scores(ids: list[int]) -> list[float]:
        table = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
        return table[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

    async def completions(request: web.Request) -> web.Response:
        body = await request.json()
        ids = body["prompt"] if isinstance(body["prompt"], list) else tokenizer.encode(body["prompt"])
        made = [ids[(7 * i) % len(ids)] for i in range(body["max_tokens"])]
        choice = {"logprobs": None, "prompt_logprobs": None}
        if body.get("prompt_logprobs") is not None and not ignores_prompt:
            entries = [{str(t): {"logprob": s, "rank": 1}} for t, s in zip(ids[1:], scores(ids), strict=True)]
            choice["prompt_logprobs"] = [None, *entries]
        if body.get("return_token_ids"):
            own = scores([*ids, *made])[-len(made) :]
            choice |= {"token_ids": made, "logprobs": {"token_logprobs": own}}
        return web.json_response({"choices": [choice], "usage": {"prompt_tokens": len(ids)}})

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in names]})

    async def start() -> web.AppRunner:
        app = web.Application()
        app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", models)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return runner

    runner = run(start())
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        run(runner.cleanup())


def test_a_server_with_openai_endpoints_alone_is_probed_by_prompt_logprobs(model, tmp_path, capsys):
    with served_like_vllm(model) as url:
        assert main([url, "--model", str(model)]) == 0
    said = capsys.readouterr().out
    assert (
        "chat template          -" in said and "not checked" in said and "cached prefix          ok" in said
    )
    with served_like_vllm(changed(model, tmp_path / "held", exchange("layers.0.", "layers.1."))) as url:
        assert main([url, "--model", str(model)]) == 1
    assert "has layers 0 and 1 exchanged." in capsys.readouterr().out
    with served_like_vllm(model, ignores_prompt=True) as url, pytest.raises(SystemExit):
        main([url, "--model", str(model)])
    assert "returns no log-probs of a prompt" in capsys.readouterr().err

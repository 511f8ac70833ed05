"""Training with images: packed documents compute what transformers computes of each alone, on any ranks."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from argument_helpers import parse
from tiny_vision import FAMILIES, make_picture, make_tokenizer, make_vision_folder, make_vision_model
from trainer_helpers import backend_of, init_process_group, meeting_point, train, trainer_args, weights_of

from slime.backends.fsdp import create_backend
from slime.backends.shared.microbatch import build_micro_batch, build_micro_batches
from slime.batch.convert import samples_to_batch
from slime.batch.flops import sample_sizes
from slime.batch.split import split_for_ranks
from slime.step.training_step import TrainingStep
from slime.utils.media.image_tokens import encoder_of
from slime.utils.processing_utils import load_processor
from slime.utils.types import Sample

SHOWN = ((), ((64, 48),), ((64, 48), (100, 70)), ((40, 120),))  # sizes of the pictures of each prompt


@pytest.fixture(scope="module", autouse=True)
def group():
    init_process_group()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vlm") / request.param, request.param)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    return make_vision_model(tmp_path_factory.mktemp("vlm") / "qwen3_vl", "qwen3_vl")


def image_samples(model, group_size=2, shown=SHOWN):
    """Groups with no picture, one, two and another; samples of a group share theirs."""
    encoder = encoder_of(load_processor(str(model)))
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, sizes in enumerate(shown):
        ids = [70 + number, 71]
        for _ in sizes:
            ids += [encoder.image_token_id, 72, 73]
        made = encoder.encode_prompt(ids, [make_picture(number * 7 + i, *s) for i, s in enumerate(sizes)])
        for _ in range(group_size):
            count = int(torch.randint(2, 9, (1,), generator=generator))
            answer = torch.randint(10, 200, (count,), generator=generator).tolist()
            samples.append(
                Sample(
                    group_index=number,
                    index=len(samples),
                    tokens=made.ids + answer,
                    response_length=count,
                    reward=float(len(samples) % 3),
                    rollout_log_probs=[-1.0] * count,
                    multimodal_train_inputs=made.inputs,
                    status=Sample.Status.COMPLETED,
                )
            )
    return samples


def reference(model, samples, weigh=None):
    """Log-probs by transformers, a sample at a time, through its own forward; `weigh`: and gradients."""
    from transformers import AutoModelForImageTextToText

    lm = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for sample in samples:
        tokens = torch.tensor(sample.tokens)[None]
        media = dict(sample.multimodal_train_inputs or {})
        if "image_grid_thw" in media:
            media["mm_token_type_ids"] = (tokens == lm.config.image_token_id).int()
        logits = lm(input_ids=tokens, use_cache=False, **media).logits[0].float()
        table = torch.log_softmax(logits[-sample.response_length - 1 : -1], -1)
        found.append(table.gather(1, tokens[0, -sample.response_length :, None])[:, 0])
        if weigh is not None:
            (weigh * found[-1]).sum().backward()
    return [one.detach() for one in found], lm


def worst(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_packed_documents_with_images_are_those_of_transformers(model):
    backend = backend_of(trainer_args(model))
    samples = image_samples(model)
    batch = samples_to_batch(backend.args, samples)
    expected, lm = reference(model, samples, weigh=1.0)
    everything = build_micro_batches(batch, [list(range(len(samples)))])
    alone = build_micro_batches(batch, [[i] for i in range(len(samples))])
    for mbs in (everything, alone):
        assert worst(backend.log_probs(mbs).log_probs, expected) < 2e-5
    # Gradients of both towers too: samples that share pictures add theirs up.
    mb, share = backend._send(everything[0], backend.model)
    backend._forward(mb, share).log_probs.sum().backward()
    gradients = {name: p.grad for name, p in lm.named_parameters()}
    scale = max(float(g.abs().max()) for g in gradients.values() if g is not None)
    for name, parameter in backend.model.lm.named_parameters():
        expected_grad = gradients[name]
        if expected_grad is not None:
            assert (parameter.grad - expected_grad).abs().max() < 2e-5 * scale, name


def test_a_step_trains_both_towers_or_the_text_alone(model, tmp_path):
    for frozen in (False, True):
        backend = backend_of(trainer_args(model, freeze_vision_tower=frozen, micro_batch_size=3))
        before = weights_of(backend)
        train(backend, backend.args, image_samples(model))
        changed = {
            name.split(".")[1] for name, w in weights_of(backend).items() if not torch.equal(w, before[name])
        }
        tower = {"visual", "vision_model", "connector"} & {name.split(".")[1] for name in before}
        assert tower and (changed.isdisjoint(tower) if frozen else tower <= changed)
    backend.save_hf(tmp_path / "saved")
    mbs = build_micro_batches(samples_to_batch(backend.args, image_samples(model)), [[0, 2, 5]])
    expected, _ = reference(tmp_path / "saved", [image_samples(model)[i] for i in (0, 2, 5)])
    assert worst(backend.log_probs(mbs).log_probs, expected) < 2e-5
    assert (tmp_path / "saved" / "preprocessor_config.json").is_file()


def test_adapters_train_the_text_alone_and_leave_merged(model, tmp_path):
    backend = backend_of(trainer_args(model, lora_rank=4, lr=0.05, micro_batch_size=3))
    before = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
    tower = ("visual", "vision_model", "connector")
    train(backend, backend.args, image_samples(model))
    adapters = {name: tensor for bucket in backend.export_adapter() for name, tensor in bucket}
    layers = 4 if "moe" in model.name else 7  # of each decoder layer; experts get none
    assert len(adapters) == 2 * layers * backend.hf_config.get_text_config().num_hidden_layers
    assert not any(part in name for name in adapters for part in tower)
    after = {name: tensor for bucket in backend.export() for name, tensor in bucket}
    assert after.keys() == before.keys()
    changed = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    assert len(changed) == len(adapters) // 2
    backend.save_hf(tmp_path / "saved")
    samples = [image_samples(model)[i] for i in (0, 2, 5)]
    mbs = build_micro_batches(samples_to_batch(backend.args, samples), [[0, 1, 2]])
    expected, _ = reference(tmp_path / "saved", samples)
    assert worst(backend.log_probs(mbs).log_probs, expected) < 2e-5


def test_weights_leave_under_the_names_of_the_hub(model):
    from safetensors import safe_open

    backend = backend_of(trainer_args(model))
    sent = {name: tensor for bucket in backend.export() for name, tensor in bucket}
    with safe_open(model / "model.safetensors", "pt") as file:
        assert set(sent) == set(file.keys())
        for name in file.keys():  # noqa: SIM118 - not a dict
            assert torch.equal(file.get_tensor(name), sent[name])


TENSOR, CONTEXT = dict(tensor_model_parallel_size=2), dict(context_parallel_size=2)
# Name -> family, settings, layout of two ranks.
CASES = {
    "both towers": ("qwen3_vl", {}, {}),
    "text": ("idefics3", dict(freeze_vision_tower=True), {}),
    "adapters": ("qwen3_vl", dict(lora_rank=4), {}),
    "tensor": ("qwen3_vl", {}, TENSOR),
    "tensor, adapters": ("qwen2_5_vl", dict(lora_rank=4), TENSOR),
    "tensor, tiles": ("idefics3", {}, TENSOR),
    "context": ("qwen3_vl", dict(micro_batch_size=3), CONTEXT),
    "context, adapters": ("qwen2_5_vl", dict(lora_rank=4), CONTEXT),
    "context, tiles": ("smolvlm", {}, CONTEXT),
    "experts": ("qwen3_vl_moe", {}, {}),
    "experts, tensor": ("qwen3_vl_moe", {}, TENSOR),
    "experts, context": ("qwen3_vl_moe", {}, CONTEXT),
}


def step_results(rank, world_size, folder):
    """Loss, gradient norm and weights after a step of SGD, for each case."""
    results = {}
    for case, (family, changes, layout) in CASES.items():
        model = folder / family
        changes = dict(optimizer="sgd", lr=0.2, micro_batch_size=2) | changes
        args = trainer_args(model, **changes, **(layout if world_size > 1 else {}))
        backend = create_backend(args, rank=rank, world_size=world_size, device="cpu")
        samples = image_samples(model, 2, (*SHOWN, ()))[1:]  # an odd number: a rank has an empty micro-batch
        place = backend.layout
        shares = split_for_ranks(args, samples_to_batch(args, samples), place.dp_size, cp_size=place.cp_size)
        metrics = TrainingStep(backend, args, 0, shares[place.dp_rank]).run().summary
        sent = {name: tensor.clone() for bucket in backend.export() for name, tensor in bucket}
        results[case] = (metrics["train/loss"], metrics["train/grad_norm"], sent)
    return results


def work(rank, address, folder):
    torch.set_num_threads(1)
    init_process_group(rank, 2, address)
    results = step_results(rank, 2, folder)
    if rank == 0:
        torch.save(results, folder / "two.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory):
    """The results of two ranks and of one."""
    folder = tmp_path_factory.mktemp("ranks")
    for family in FAMILIES:
        make_vision_model(folder / family, family)
    mp.spawn(work, args=(meeting_point(), folder), nprocs=2)
    return torch.load(folder / "two.pt"), step_results(0, 1, folder)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_do_what_one_does(on_two_ranks, case):
    """With two data-parallel ranks, only one has images."""
    (loss, norm, found), (own_loss, own_norm, expected) = (results[case] for results in on_two_ranks)
    assert abs(loss - own_loss) < 1e-5 and norm == pytest.approx(own_norm, rel=1e-4) and norm > 0.01
    for name, weight in expected.items():
        assert torch.allclose(weight, found[name], atol=2e-5), name


def test_patches_count_in_the_size_of_a_sample(qwen):
    samples = image_samples(qwen, 1)
    sizes = sample_sizes(samples_to_batch(trainer_args(qwen), samples))
    assert sizes[0] == len(samples[0].tokens)
    assert sizes[1] > len(samples[1].tokens) + samples[1].multimodal_train_inputs["pixel_values"].shape[0]


def test_samples_of_a_group_share_one_pass_of_the_tower(qwen):
    backend = backend_of(trainer_args(qwen))
    samples = image_samples(qwen, 3)
    mb = build_micro_batch(samples_to_batch(backend.args, samples), [3, 4, 5])
    packed = backend._send(mb, backend.model)[0].images
    assert len(packed.media["image_grid_thw"]) == 1
    assert len(packed.rows) == 3 * len(packed.picks.unique())


def test_tokens_and_images_that_do_not_belong_together_are_named(qwen):
    backend = backend_of(trainer_args(qwen))
    samples = image_samples(qwen, 1)
    samples[1].multimodal_train_inputs = samples[2].multimodal_train_inputs
    mbs = build_micro_batches(samples_to_batch(backend.args, samples), [[1]])
    with pytest.raises(ValueError, match="do not belong together"):
        backend.log_probs(mbs)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (dict(train_backend="megatron"), "it builds no vision tower"),
        (dict(multimodal_keys='{"audio": "clips"}'), "sound is not trained"),
        (dict(multimodal_keys='{"image": 3}'), "give the columns of images"),
    ],
)
def test_what_does_not_go_with_images_is_refused(tmp_path, changes, why):
    folder = make_vision_folder(tmp_path / "m", "qwen3_vl")
    defaults = dict(
        hf_checkpoint=str(folder), multimodal_keys='{"image": "images"}', rollout_engine="embedded"
    )
    with pytest.raises((ValueError, SystemExit), match=why):
        parse(**(defaults | changes))


@pytest.mark.parametrize(
    ("kind", "why"),
    [("gemma3", "both directions"), ("qwen3", "does not know it as a vision-language family")],
)
def test_other_families_are_refused_by_name(tmp_path, kind, why):
    make_tokenizer("qwen3_vl").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    with pytest.raises(ValueError, match=f"{kind}.*{why}"):
        parse(hf_checkpoint=str(tmp_path), multimodal_keys='{"image": "images"}', rollout_engine="embedded")

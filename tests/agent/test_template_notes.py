"""What `slime doctor` says of a chat template."""

from chat_templates import byte_tokenizer

from slime.preflight.models import template_notes


def test_doctor_says_whether_turns_stay_one_sample_and_where_they_fork():
    (kept,) = template_notes(byte_tokenizer("chatml"))
    assert kept.kind == "note" and "it has the prefix property" in kept.text
    (forks,) = template_notes(byte_tokenizer("qwen3"))
    assert "forks at a user message after an answer with thoughts" in forks.text

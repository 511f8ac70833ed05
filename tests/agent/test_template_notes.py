"""What `slime doctor` says of a chat template."""

import pytest
from chat_templates import FAMILIES, byte_tokenizer

from slime.preflight.models import template_notes

PREFIX = "it has the prefix property"
FORKS = "forks at a user message after an answer with thoughts"
SAID = {
    "chatml": (PREFIX,),
    "qwen3": (FORKS,),
    "qwen3_no_thoughts": (FORKS,),  # thoughts of a conversation that somebody else began
    "llama3": (PREFIX,),
    "glm": (PREFIX,),
    "smollm2": (PREFIX, "does not take tools"),
    "deepseek": (PREFIX, "does not take a system message within the conversation"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_doctor_says_whether_turns_stay_one_sample_where_they_fork_and_what_is_refused(family):
    (found,) = template_notes(byte_tokenizer(family))
    assert found.kind == "note"
    assert all(words in found.text for words in SAID[family]), found.text
    assert ("history='extend'" in found.text) == (FORKS in found.text)
    assert ("does not take" in found.text) == (len(SAID[family]) == 2)

"""The samples of a run in a real browser: tokens, episodes, images, comparisons."""

import contextlib
import json
import re
import sqlite3

import pytest
from browser_pages import see
from page_world import make_image_run, serving

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")


def test_tokens_are_coloured_by_probability_advantage_version_and_mask(open_page, world):
    page = open_page(world[0], "#/samples?runs=good&id=1")
    page.wait_for_selector(".tokens i")
    for mode, mark in (("probability", "p"), ("advantage", "p"), ("version", "v"), ("mask", "m")):
        page.check(f"input[name=mode][value={mode}]")
        names = page.eval_on_selector_all(".tokens i", "marks => marks.map(mark => mark.className)")
        assert len(names) == 6 and all(re.match(rf"{mark}\d", name) for name in names), (mode, names)
    assert page.evaluate("document.querySelectorAll('.tokens .m0').length") == 1
    page.hover(".tokens i >> nth=2")
    assert "token 3 of 6" in page.inner_text("main .legend[role=status]")
    # The address names what is seen.
    assert "color=mask" in page.url and "id=1" in page.url


def test_samples_are_sorted_and_searched(open_page, world):
    page = open_page(world[0], "#/samples?runs=good&order=worst")
    rewards = page.eval_on_selector_all(
        ".vlist .row > :nth-child(2)", "cells => cells.map(c => Number(c.textContent))"
    )
    assert len(rewards) > 10 and rewards == sorted(rewards)
    page.select_option("select[aria-label=Sort]", "newest")
    page.fill("input[aria-label=Search]", "of step 4")
    see(page, ".bar", "8 found, 100% searched")


def test_before_and_after_of_a_prompt_are_shown_for_two_runs(open_page, world):
    page = open_page(world[0], "#/prompts?runs=good,crashed")
    text = page.inner_text("main")
    assert "Before: step 0" in text and "After: step 5" in text and "After: step 2" in text


def test_an_episode_is_shown_turn_by_turn_with_its_tool_calls_and_forks(open_page, world):
    page = open_page(world[0], "#/samples?runs=agent&step=1&order=made")
    page.wait_for_selector(".turns")
    roles = page.eval_on_selector_all(".turn .role b", "marks => marks.map(mark => mark.textContent)")
    assert roles == ["system", "user", "assistant, turn 0", "assistant, turn 1"]
    first = page.inner_text(".turn[data-turn='0']")
    for words in ("2 tokens", "reward 0.25", "engine 500 ms", "calculate", "expression", "12*3"):
        assert words in first
    # The result of a tool is text, whatever it holds, and belongs to its call.
    assert page.inner_text(".call pre") == "36 <img src=x>" and page.query_selector("main img") is None
    # Only tokens of the policy have a colour: the environment's are not among them.
    marks = page.eval_on_selector_all(".tokens i", "marks => marks.map(mark => mark.className)")
    assert marks == ["p7", "p1", "p4", "p7"]
    assert [b.inner_text() for b in page.query_selector_all(".tree button")] == ["turn 0", "turn 1", "turn 2"]
    page.click(".tree button:has-text('turn 2')")
    page.wait_for_selector(".turn[data-turn='2']")
    # A turn that the other branch trains has no log-probs here, so it has no colour either.
    marks = page.eval_on_selector_all(".tokens i", "marks => marks.map(mark => mark.className)")
    assert marks == ["env", "env", "p4", "p7"] and "not trained here" in page.inner_text(
        ".turn[data-turn='0']"
    )


def test_a_sample_is_copied_as_json(open_page, world):
    page = open_page(world[0], "#/samples?runs=agent&step=1&order=made")
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("button:has-text('Copy JSON')")
    see(page, "#say", "Copied")
    copied = json.loads(page.evaluate("navigator.clipboard.readText()"))
    assert [message["role"] for message in copied["messages"]] == ["system", "user", "assistant", "assistant"]
    call = copied["messages"][2]["tool_calls"][0]
    assert call == {"name": "calculate", "arguments": {"expression": "12*3"}, "result": "36 <img src=x>"}


def test_two_responses_of_a_group_are_compared_word_by_word(open_page, world):
    page = open_page(world[0], "#/samples?runs=agent&step=1&order=made")
    page.select_option("select[aria-label='Compare with']", index=1)
    page.wait_for_selector(".diff ins")
    assert page.inner_text(".diff del") == "36" and page.inner_text(".diff ins") == "63"


def test_images_are_shown_where_their_message_is(open_page, world):
    page = open_page(world[0], "#/samples?runs=images&step=1&order=worst")
    page.wait_for_selector(".images img")
    size = "images => images.map(image => [image.naturalWidth, image.naturalHeight])"
    assert page.eval_on_selector_all(".images img", size) == [[40, 30]]
    page.click(".vlist .row >> nth=1")
    page.wait_for_selector(".turn.tool .images img")
    assert page.eval_on_selector_all(".turn.user .images img", size) == [[40, 30]]
    assert page.eval_on_selector_all(".turn.tool .images img", size) == [[512, 341]]
    assert "image_pad" not in page.inner_text(".turns") and "[image]" in page.inner_text(".turn.user")
    # Only what the policy sampled is coloured.
    marks = page.eval_on_selector_all(".tokens i", "marks => marks.map(mark => mark.className)")
    assert marks == ["p7", "p7"]


@pytest.mark.parametrize(
    "data", [b"<svg onload='document.title=1'>", b"GIF89a", b"\x89PNG\r\n\x1a\n" + bytes(9 << 17)]
)
def test_what_is_no_image_is_never_given_to_the_browser(open_page, tmp_path, data):
    make_image_run(tmp_path / "images")
    with contextlib.closing(sqlite3.connect(tmp_path / "images" / "record.db")) as connection, connection:
        connection.execute("UPDATE images SET data = ?", (data,))
    with serving(tmp_path / "images") as (url, _):
        page = open_page(url, "#/samples?step=1&order=worst")
        see(page, ".images", "Image 1 cannot be shown.")
        assert page.query_selector("main img") is None
        page.close()


def test_the_first_sample_opens_by_itself_and_stays_after_a_choice(open_page, world):
    page = open_page(world[0], "#/samples?runs=good&order=best")
    page.wait_for_selector(".vlist .row[aria-selected=true] >> nth=0")
    see(page, "main h2", "Step")
    page.click(".vlist .row >> nth=3")
    page.wait_for_selector("#row-3[aria-selected=true]")
    assert page.locator(".vlist .row[aria-selected=true]").count() == 1

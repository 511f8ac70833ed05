"""The table of runs, their settings, and a live run in a real browser."""

import json
import random
import time
from pathlib import Path

import pytest
from browser_pages import see
from page_world import HOSTILE, START, make_run, make_sample, metric_lines, serving

from slime.liveness.wait_table import WaitRow, write_table
from slime.record import RecordWriter, group_entries
from slime.utils.files.folder_lock import FolderLock

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")


def test_a_name_of_a_run_is_text_too(open_page, world):
    page = open_page(world[0])
    assert "<script>" in page.text_content("#runs") and page.query_selector("#runs script") is None


def test_all_runs_are_in_a_table_that_sorts_and_groups_by_seed(open_page, seeds):
    page = open_page(seeds, "#/runs")
    names = "cells => cells.map(cell => cell.textContent)"
    assert page.eval_on_selector_all(".runs td.name:nth-child(2)", names) == [
        *["a (2 seeds)", "a-seed1", "a-seed2", "b"],
    ]
    assert "0.5 ± 0" in page.inner_text(".runs tr.seeds") and page.locator(".chip input:checked").count() == 3
    page.click(".sort:has-text('Reward')")
    page.click(".sort:has-text('Reward')")
    assert page.eval_on_selector_all(".runs td.name:nth-child(2)", names)[0] == "b"
    assert "sort=Reward" in page.url
    page.uncheck("label:has-text('group by seed') input")
    assert page.locator(".runs tr.seeds").count() == 0
    page.uncheck(".runs input[aria-label='Show b']")
    see(page, ".bar", "2 of 3 selected")
    with page.expect_download() as download:
        page.click(".bar button:has-text('CSV')")
    assert Path(download.value.path()).read_text().startswith("Run,State,Tags,Reward,Step,Time")


def test_tags_and_a_note_are_edited_on_the_page(open_page, tmp_path):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", 4)
    with serving(tmp_path) as (url, token):
        page = open_page(url, f"#/runs?token={token}")
        page.click("button[aria-label='Tags and note of b']")
        page.fill("dialog input[aria-label=Tags]", "baseline, <b>bold</b>")
        page.fill("dialog textarea", HOSTILE)
        page.click("dialog button:has-text('Save')")
        page.wait_for_selector("dialog", state="detached")
        names = page.eval_on_selector_all(".runs .tag", "marks => marks.map(mark => mark.textContent)")
        assert names == ["baseline", "<b>bold</b>"] and page.inner_text("td.note >> nth=1") == HOSTILE
        page.fill("input[aria-label='Filter runs']", "baseline")
        assert page.locator(".runs tbody tr").count() == 1
        page.goto(f"{url}/#/overview?runs=b")
        see(page, "h1 .tag", "baseline")
        page.close()


def test_only_a_live_run_is_called_live(open_page, world):
    page = open_page(world[0], "#/overview?runs=good")
    page.wait_for_timeout(500)
    assert page.inner_text("#live") == ""


def test_differences_between_settings_are_shown(open_page, world):
    page = open_page(world[0], "#/settings?runs=good,crashed")
    text = page.inner_text("tbody")
    assert "--lr" in text and "--loss-type" not in text


def test_a_live_run_grows_on_the_page_and_takes_actions(open_page, tmp_path):
    folder = make_run(tmp_path / "live", 3, exit=None)
    lock = FolderLock(folder, "--run-dir")
    try:
        with serving(folder) as (url, token):
            page = open_page(url, f"#token={token}")
            assert "token" not in page.url
            see(page, "main", "step 3")
            see(page, "#live", "live")
            writer = RecordWriter(folder / "record.db", "abc", 1 << 28)
            rng = random.Random(1)
            samples = [[make_sample(3, 0, copy, rng) for copy in range(4)]]
            writer.add("train", 3, group_entries(samples, "trained"))
            with (folder / "metrics.jsonl").open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in metric_lines(3, START + 30))
            see(page, "main", "step 4")
            page.keyboard.press("9")
            page.wait_for_selector("body[data-view=actions]")
            assert page.is_disabled("[data-action=resume]") and page.is_enabled("[data-action=pause]")
            write_table(folder, [WaitRow("run", "paused", "", time.time() - 240, None)])
            page.reload()
            see(page, ".pause", "Paused for 4 min")
            assert page.is_enabled("[data-action=resume]") and page.is_disabled("[data-action=pause]")
            page.fill("input[aria-label='Learning rate']", "5e-7")
            page.click("form:has(input[aria-label='Learning rate']) button")
            see(page, "tbody", "lr 5.00e-7")
            writer.close()
            page.close()
    finally:
        lock.release()

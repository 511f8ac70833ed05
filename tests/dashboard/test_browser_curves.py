"""Curves, distributions and the timeline of runs in a real browser."""

from pathlib import Path

import pytest
from browser_pages import PATIENCE_MS, see

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")


def test_curves_are_added_smoothed_and_taken_away_as_files(open_page, world):
    page = open_page(world[0], "#/curves?runs=good,crashed&name=rollout/raw_reward")
    page.wait_for_selector(".chart canvas")
    page.fill("input[aria-label='Add a metric']", "train/grad_norm")
    page.dispatch_event("input[aria-label='Add a metric']", "change")
    page.wait_for_selector(".chart canvas >> nth=1")
    assert "train%2Fgrad_norm" in page.url
    with page.expect_download() as download:
        page.click("button[aria-label='Download as CSV: rollout/raw_reward']")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("rollout step,good,crashed") and len(lines) == 7
    with page.expect_download() as download:
        page.click("button[aria-label='Download as PNG: rollout/raw_reward']")
    assert Path(download.value.path()).read_bytes()[:4] == b"\x89PNG"


def test_system_curves_have_a_line_for_each_process(open_page, world):
    page = open_page(world[0], "#/overview?runs=good")
    page.keyboard.press("s")
    page.wait_for_selector("body[data-view=system] .chart canvas >> nth=3")
    titles = page.eval_on_selector_all(".chart h2 .t", "marks => marks.map(mark => mark.textContent)")
    assert [title.partition(" (")[0] for title in titles] == [
        "CPU",
        "Memory",
        "GPU utilisation",
        "GPU memory",
    ]
    assert page.locator(".chart >> nth=0").locator(".u-series").count() == 5  # with the time
    with page.expect_download() as download:
        page.click("button[aria-label='Download as CSV: cpu_cores']")
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "time,driver,engine-0,engine-1,trainer-0" and len(lines) == 25
    page = open_page(world[0], "#/system?runs=empty")
    see(page, "main", "Nothing is known of the machines yet")


def test_distributions_are_drawn_over_steps_and_lead_to_samples(open_page, world):
    page = open_page(world[0], "#/distributions?runs=good")
    titles = page.eval_on_selector_all(".chart h2 .t", "marks => marks.map(mark => mark.textContent)")
    assert titles == [
        *["Reward", "Response length", "Advantage", "Staleness", "Prompts by difficulty"],
        *["Ratio", "Entropy", "pass@k of groups"],
    ]
    assert "48 samples of 6 steps" in page.inner_text(".bar") and "What is 0+0?" in page.inner_text(
        ".hardest"
    )
    page.focus(".heat >> nth=0")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "step 1: mean" in page.inner_text(".chart [role=status] >> nth=0")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-view=samples] .vlist .row")
    assert "step=1" in page.url


def test_runs_that_differ_by_their_seed_are_one_curve_with_a_band(open_page, seeds):
    page = open_page(seeds, "#/curves?name=rollout/raw_reward")
    see(page, ".u-legend", "a (2 seeds)")
    assert "a-seed1" not in page.inner_text(".u-legend") and page.locator(".u-legend .band").count() == 2
    page.uncheck("label:has-text('mean of seeds') input")
    see(page, ".u-legend", "a-seed1")
    assert "each=1" in page.url


def test_a_curve_has_a_logarithmic_axis(open_page, world):
    page = open_page(world[0], "#/curves?runs=good&name=perf/tokens_per_gpu_per_sec,train/loss")
    plot = "document.querySelector('.chart canvas').toDataURL()"
    linear = page.evaluate(plot)
    page.click("button:has-text('log scale')")
    page.wait_for_function("document.querySelector('[aria-pressed=true]') !== null", timeout=PATIENCE_MS)
    assert "y=log" in page.url and page.evaluate(plot) != linear


def test_the_timeline_has_a_lane_for_each_engine_the_push_and_waits(open_page, world):
    page = open_page(world[0], "#/timeline?runs=good&step=1")
    text = page.inner_text("main")
    for words in ("engine-0", "engine-1", "trainer-0", "Busy and idle", "push: engines take it", "waits: "):
        assert words in text
    whole = page.evaluate("document.querySelector('.lanes canvas').toDataURL()")
    page.click("button[aria-label='Zoom in']")
    assert page.evaluate("document.querySelector('.lanes canvas').toDataURL()") != whole
    with page.expect_download() as download:
        page.click("button[aria-label='Download as CSV']")
    assert Path(download.value.path()).read_text().startswith("step,lane,name,start,end,seconds\n1,loop,")

"""The page in a real browser: every view of every kind of run, live, hostile, narrow, dark, by keys alone."""

import contextlib
import importlib.util
import json
import os
import random
import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest
from page_world import (
    HOSTILE,
    START,
    make_agent_run,
    make_image_run,
    make_run,
    make_sample,
    metric_lines,
    serving,
)

from slime.liveness.wait_table import WaitRow, write_table
from slime.record import RecordWriter, group_entries
from slime.utils.files.folder_lock import FolderLock

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")
VIEWS = (
    "overview",
    "runs",
    "curves",
    "samples",
    "prompts",
    "distributions",
    "timeline",
    "system",
    "waste",
    "settings",
    "logs",
    "actions",
)
PATIENCE_MS = 60_000
ROOT = Path(__file__).parent.parent.parent
STEPS = int(os.environ.get("PAGE_STEPS", "300"))  # of the huge run; 10000 make a million samples


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium: `make test-browser` installs it")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    make_run(folder / "good")
    make_run(folder / "crashed", 3, exit="RuntimeError: CUDA out of memory", lr=2e-6, text=HOSTILE)
    make_run(folder / HOSTILE.replace("/", "_")[:60], 2, text=HOSTILE)
    make_agent_run(folder / "agent")
    make_image_run(folder / "images")
    (folder / "empty").mkdir()
    (folder / "empty" / "run.json").write_text("{}")
    with serving(folder) as (url, token):
        yield url, token, folder


@pytest.fixture
def open_page(browser):
    """Opens a view and waits until it is drawn; anything that the browser complains of fails the test."""
    complaints, contexts = [], []

    def open_at(url, hash="", *, width=1200, height=800, scheme="light"):
        viewport = {"width": width, "height": height}
        context = browser.new_context(viewport=viewport, color_scheme=scheme, accept_downloads=True)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        # Nothing may be asked of another host.
        page.on(
            "request",
            lambda r: None if r.url.startswith((url, "blob:", "data:")) else complaints.append(r.url),
        )
        page.goto(f"{url}/{hash}")
        page.wait_for_selector("body[data-ready]", timeout=PATIENCE_MS)
        return page

    yield open_at
    for context in contexts:
        context.close()
    # A request that is refused with a reason is part of the page's work.
    assert [c for c in complaints if "400 (Bad Request)" not in c and "404 (Not Found)" not in c] == []


def see(page, selector, text):
    """Wait for a text; by a selector, since the page's policy forbids to evaluate words."""
    page.locator(selector).filter(has_text=text).first.wait_for(timeout=PATIENCE_MS)


def is_narrower_than_the_window(page):
    return page.evaluate("document.documentElement.scrollWidth <= window.innerWidth + 1")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("run", ["good", "crashed", "empty", "good,crashed"])
def test_every_view_of_every_run_is_drawn_or_says_why_not(open_page, world, view, run):
    page = open_page(world[0], f"#/{view}?runs={run}")
    text = page.inner_text("main")
    assert len(text) > 20 and "cannot be shown" not in text and "undefined" not in text and "NaN" not in text
    assert page.get_attribute("#nav [aria-current]", "href").startswith(f"#/{view}")


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("width", [400, 820, 1900])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_views_fit_narrow_and_wide_screens_in_light_and_dark(open_page, world, view, width, scheme):
    page = open_page(world[0], f"#/{view}?runs=good", width=width, scheme=scheme)
    assert is_narrower_than_the_window(page)
    assert page.get_attribute("html", "data-theme") == scheme


@pytest.mark.parametrize("view", VIEWS)
def test_what_a_model_wrote_is_never_run(open_page, world, view):
    page = open_page(world[0], f"#/{view}?runs=crashed&id=1&color=plain")
    page.wait_for_timeout(300)
    assert "owned" not in page.title() and page.query_selector("main script, main img") is None
    if view == "samples":
        assert HOSTILE in page.inner_text("main pre.text >> nth=-1")


def test_a_name_of_a_run_is_text_too(open_page, world):
    page = open_page(world[0])
    assert "<script>" in page.text_content("#runs") and page.query_selector("#runs script") is None


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


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    """Two runs that differ by their seed only, one with another learning rate, and one that crashed."""
    folder = tmp_path_factory.mktemp("seeds")
    make_run(folder / "a-seed1", seed=1)
    make_run(folder / "a-seed2", 6, seed=2)
    make_run(folder / "b", 4, lr=2e-6, exit="RuntimeError: no memory")
    with serving(folder) as (url, _):
        yield url


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


def test_runs_that_differ_by_their_seed_are_one_curve_with_a_band(open_page, seeds):
    page = open_page(seeds, "#/curves?name=rollout/raw_reward")
    see(page, ".u-legend", "a (2 seeds)")
    assert "a-seed1" not in page.inner_text(".u-legend") and page.locator(".u-legend .band").count() == 2
    page.uncheck("label:has-text('mean of seeds') input")
    see(page, ".u-legend", "a-seed1")
    assert "each=1" in page.url


def test_the_first_sample_opens_by_itself_and_stays_after_a_choice(open_page, world):
    page = open_page(world[0], "#/samples?runs=good&order=best")
    page.wait_for_selector(".vlist .row[aria-selected=true] >> nth=0")
    see(page, "main h2", "Step")
    page.click(".vlist .row >> nth=3")
    page.wait_for_selector("#row-3[aria-selected=true]")
    assert page.locator(".vlist .row[aria-selected=true]").count() == 1


def test_a_curve_has_a_logarithmic_axis(open_page, world):
    page = open_page(world[0], "#/curves?runs=good&name=perf/tokens_per_gpu_per_sec,train/loss")
    plot = "document.querySelector('.chart canvas').toDataURL()"
    linear = page.evaluate(plot)
    page.click("button:has-text('log scale')")
    page.wait_for_function("document.querySelector('[aria-pressed=true]') !== null", timeout=PATIENCE_MS)
    assert "y=log" in page.url and page.evaluate(plot) != linear


def test_only_a_live_run_is_called_live(open_page, world):
    page = open_page(world[0], "#/overview?runs=good")
    page.wait_for_timeout(500)
    assert page.inner_text("#live") == ""


def test_differences_between_settings_are_shown(open_page, world):
    page = open_page(world[0], "#/settings?runs=good,crashed")
    text = page.inner_text("tbody")
    assert "--lr" in text and "--loss-type" not in text


def tab_to(page, selector, most=80):
    """Press Tab until something is reached, as somebody without a mouse does."""
    for _ in range(most):
        page.keyboard.press("Tab")
        if page.evaluate("selector => document.activeElement.matches(selector)", selector):
            # What is reached can be seen to be.
            style = "getComputedStyle(document.activeElement).outlineStyle"
            assert page.evaluate(style) != "none", selector
            return
    raise AssertionError(f"Tab never came to {selector}")


def test_everything_is_reached_by_keys_alone(open_page, world):
    page = open_page(world[0], "#/overview?runs=good")
    page.keyboard.press("3")
    page.wait_for_selector("body[data-view=samples] .vlist .row")
    tab_to(page, ".vlist")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector("#row-2[aria-selected=true]")
    see(page, "main h2", "sample 42")
    tab_to(page, "input[name=mode]")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("input[value=advantage]:checked")
    tab_to(page, ".tokens")
    page.keyboard.press("ArrowRight")
    assert "token 1 of 6" in page.inner_text("main .legend[role=status]")
    page.keyboard.press("5")
    page.wait_for_selector("body[data-view=timeline] .lanes canvas")
    tab_to(page, ".lanes")
    page.keyboard.press("+")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("0")
    page.keyboard.press("2")
    page.wait_for_selector("body[data-view=curves] .chart canvas")
    tab_to(page, ".plot")
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("+")
    tab_to(page, ".tip")
    page.wait_for_selector(".tipbox")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("dialog[open]")
    page.keyboard.press("Escape")
    page.keyboard.press("t")
    assert page.get_attribute("html", "data-theme") == "dark"
    tab_to(page, "#nav a[href^='#/settings']")
    page.keyboard.press("Enter")
    page.wait_for_selector("body[data-view=settings]")
    nameless = "e => !(e.textContent || e.labels?.length || e.getAttribute('aria-label'))"
    count = f"[...document.querySelectorAll('button, input, select')].filter({nameless}).length"
    assert page.evaluate(count) == 0


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


def test_a_huge_run_is_scrolled_sorted_and_opened(open_page, tmp_path):
    spec = importlib.util.spec_from_file_location("made", ROOT / "benchmarks" / "dashboard.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    made.make_record(tmp_path / "huge", STEPS, 100)
    with serving(tmp_path / "huge") as (url, _):
        page = open_page(url, "#/samples?order=made")
        see(page, ".bar", f"{STEPS * 100:,} samples")
        assert page.locator(".vlist .row").count() < 100, "only what is seen exists"
        page.evaluate("document.querySelector('.vlist').scrollTop = 1e9")
        see(page, ".vlist .row .num", str(STEPS - 1))
        page.locator(".vlist .row").last.click()
        page.wait_for_selector(".tokens i")
        page.select_option("select[aria-label=Sort]", "difference")
        page.wait_for_selector(".vlist .row .rbar", state="attached")
        page.fill("input[aria-label=Step]", str(STEPS // 2))
        page.keyboard.press("Enter")
        see(page, ".bar", "100 samples")
        for view in VIEWS:
            page.goto(f"{url}/#/{view}")
            page.wait_for_selector(f"body[data-view={view}]", timeout=PATIENCE_MS)
        page.close()


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


def test_others_are_asked_for_the_token(browser, tmp_path):
    make_run(tmp_path / "run", 2)
    with serving(tmp_path / "run", host="0.0.0.0") as (url, token):
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("input[type=password]", timeout=PATIENCE_MS)
        page.fill("input[type=password]", token)
        page.keyboard.press("Enter")
        page.wait_for_selector("body[data-ready]", timeout=PATIENCE_MS)
        assert "step 2" in page.inner_text("main")
        page.close()

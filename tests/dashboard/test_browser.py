"""The whole dashboard in a real browser: every view of every run, hostile, narrow, dark, huge, by keys."""

import importlib.util
import os
from pathlib import Path

import pytest
from browser_pages import PATIENCE_MS, VIEWS, see
from page_world import HOSTILE, make_run, serving

pytestmark = pytest.mark.browser
pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")
ROOT = Path(__file__).parent.parent.parent
STEPS = int(os.environ.get("PAGE_STEPS", "300"))  # of the huge run; 10000 make a million samples


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

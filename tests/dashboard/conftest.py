"""A browser, and dashboards to open in it."""

import shutil

import pytest
from browser_pages import PATIENCE_MS
from page_world import HOSTILE, make_agent_run, make_image_run, make_run, serving


@pytest.fixture(scope="session")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium: `make test-browser` installs it")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
def seeds(tmp_path_factory):
    """Two runs that differ by their seed only, one with another learning rate, and one that crashed."""
    folder = tmp_path_factory.mktemp("seeds")
    make_run(folder / "a-seed1", seed=1)
    make_run(folder / "a-seed2", 6, seed=2)
    make_run(folder / "b", 4, lr=2e-6, exit="RuntimeError: no memory")
    with serving(folder) as (url, _):
        yield url

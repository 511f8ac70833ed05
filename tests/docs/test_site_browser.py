"""The built site in a real browser: its search, its width, its colours, and that it asks no other host."""

import os
import shutil
import subprocess
import sys

import pytest
import yaml
from docs_world import ROOT

import slime

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright: `make test-browser`")
pytest.importorskip("material", reason="needs mkdocs-material: `make test-browser`")
PATIENCE_MS = 60_000
REPOSITORY = "https://github.com/example/slime"  # of the kind whose stars the theme would ask for
TOO_WIDE = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    config = folder / "mkdocs.yml"
    paths = {"docs_dir": str(ROOT / "docs"), "site_dir": str(folder / "site"), "repo_url": REPOSITORY}
    values = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8")) | paths
    values["theme"]["custom_dir"] = str(ROOT / values["theme"]["custom_dir"])
    values["hooks"] = [str(ROOT / hook) for hook in values["hooks"]]
    config.write_text(yaml.safe_dump(values), encoding="utf-8")
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "-f", str(config)]
    subprocess.run(build, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder / "site"


@pytest.fixture(scope="module")
def browser():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs chromium: `make test-browser` installs it")
    with sync_api.sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield made
        made.close()


@pytest.fixture
def open_page(site, browser):
    """Opens a page from the disk; complaints of the browser and requests to any host fail the test."""
    complaints, contexts = [], []

    def open_at(name="index.html", *, width=1440, scheme="light"):
        contexts.append(browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.on(
            "request", lambda r: None if r.url.startswith(("file:", "data:")) else complaints.append(r.url)
        )
        page.goto((site / name).as_uri())
        return page

    yield open_at
    for context in contexts:
        context.close()
    assert complaints == []


def test_the_search_works_from_the_disk(open_page):
    page = open_page()
    page.click(".md-search__input")
    page.keyboard.type("staleness")
    found = page.locator(".md-search-result__item a")
    found.first.wait_for(timeout=PATIENCE_MS)
    address = found.first.get_attribute("href")
    assert address.startswith("file:")
    found.first.click()
    page.wait_for_url(lambda url: "index.html" not in url, timeout=PATIENCE_MS)
    assert "staleness" in page.inner_text("article").lower()


@pytest.mark.parametrize("width", [390, 1440])
def test_no_page_is_wider_than_the_window(site, open_page, width):
    page = open_page(width=width)
    names = [path.name for path in site.glob("*.html") if path.name != "404.html"]
    assert len(names) == len(list((ROOT / "docs").glob("*.md")))
    wide = {}
    for name in names:
        page.goto((site / name).as_uri())
        wide[name] = page.evaluate(TOO_WIDE)
    assert {name: pixels for name, pixels in wide.items() if pixels > 0} == {}


def test_colours_follow_the_machine_and_the_switch(open_page):
    page = open_page(scheme="dark")
    assert page.get_attribute("body", "data-md-color-scheme") == "slate"
    page.click("label.md-header__button[title='Light colours']")
    assert page.get_attribute("body", "data-md-color-scheme") == "default"


def test_a_page_shows_version_repository_logo_and_copy_buttons(open_page):
    page = open_page("quickstart.html")
    assert slime.__version__ in page.inner_text(".md-header__title")
    assert page.get_attribute(".md-header .md-source", "href") == REPOSITORY
    assert page.evaluate("document.querySelector('.md-header .md-logo img').naturalWidth") > 0
    assert page.locator("pre button, .highlight button").count() > 0

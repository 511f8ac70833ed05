"""What the site adds to the pages: the version, the address of the repository, titles in links to pages."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_config(config):
    source = (ROOT / "slime/__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "(.+)"', source, re.MULTILINE)
    config.site_name += f" {version}"
    config.repo_url = config.repo_url or repository()
    return config


def on_page_markdown(markdown, page, config, files):
    """Show titles where the text of a link is a file name, and the landing page without sidebars."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    titles = {file: title for section in config.nav for title, file in entries(section)}
    return re.sub(r"\[(\w+\.md)\](?=\(\1[)#])", lambda link: f"[{titles[link[1]]}]", markdown)


def entries(section: dict):
    [(title, value)] = section.items()
    return [(title, value)] if isinstance(value, str) else [pair for entry in value for pair in entry.items()]


def repository() -> str:
    """Return the web address of the clone's `origin` without credentials, or nothing where it has none."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    url = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    found = re.fullmatch(r"(?:https://|ssh://|)(?:[^@/]+@)?([\w.-]+\.[a-z]+)[:/](.+?)(?:\.git)?/?", url)
    return f"https://{found[1]}/{found[2]}" if found else ""

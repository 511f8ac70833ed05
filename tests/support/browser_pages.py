"""What the tests of the dashboard in a real browser share."""

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


def see(page, selector, text):
    """Wait for a text; by a selector, since the page's policy forbids to evaluate words."""
    page.locator(selector).filter(has_text=text).first.wait_for(timeout=PATIENCE_MS)

"""The environment of examples/geo_zoom: a tool that returns a picture."""

import importlib.util
from pathlib import Path

import pytest

from slime.agent.environments.protocol import Item

PATH = Path(__file__).parents[2] / "examples" / "geo_zoom" / "zoom.py"


@pytest.fixture(scope="module")
def zoom():
    spec = importlib.util.spec_from_file_location("geo_zoom", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def field(picture, place):
    return picture.getpixel((place % 2 * 32 + 16, place // 2 * 32 + 16))


def test_the_marked_field_s_colour_is_the_answer(zoom):
    for seed in range(8):
        game = zoom.Zoom()
        (picture,) = game.reset(Item(seed)).images
        bright = [place for place in range(4) if field(picture, place) == (zoom.MARK,) * 3]
        assert len(bright) == 1
        seen = game.step(f"{bright[0] + 1}").observation
        (uncovered,) = seen.images
        nearest = max(zoom.COLOURS, key=lambda name: uncovered.getpixel((5, 5))["rgb".index(name)])
        wrong = next(name for name in zoom.COLOURS if name != nearest)
        assert seen.role == "tool"
        assert game.step(f" {nearest} ").reward == 1.0 and game.step(wrong).reward == 0.0


def test_what_is_no_field_ends_the_episode(zoom):
    game = zoom.Zoom()
    game.reset(Item(1))
    ended = game.step("5")
    assert ended.done and ended.reward == 0.0 and ended.tool_errors == 1


def test_the_same_item_starts_alike(zoom):
    first, again, other = (zoom.Zoom().reset(Item(seed)).images[0].tobytes() for seed in (3, 3, 4))
    assert first == again != other

"""Pictures are read from all that prompt files hold; what is none is told with its reason."""

import base64
import functools
import http.server
import threading

import pytest
from tiny_vision import make_picture

from slime.utils.media.image_tokens import collapse, runs_of
from slime.utils.media.pictures import NotAnImage, fit_pixels, open_picture, picture_bytes, picture_key
from slime.utils.processing_utils import encode_image_for_rollout_engine, process_vision_info


@pytest.fixture
def folder(tmp_path):
    make_picture(0).save(tmp_path / "a.png")
    return tmp_path


def forms(folder):
    raw = (folder / "a.png").read_bytes()
    url = "data:image/png;base64," + base64.b64encode(raw).decode()
    path = str(folder / "a.png")
    return {
        "path": path,
        "file": (folder / "a.png").as_uri(),
        "bytes": raw,
        "datasets": {"bytes": raw, "path": None},
        "datasets by path": {"bytes": None, "path": path},
        "data URL": url,
        "part": {"type": "image", "image": path},
        "OpenAI": {"type": "image_url", "image_url": {"url": url}},
        "PIL": make_picture(0),
    }


@pytest.mark.parametrize(
    "form", ["path", "file", "bytes", "datasets", "datasets by path", "data URL", "part", "OpenAI", "PIL"]
)
def test_every_form_of_a_picture_has_the_same_pixels(folder, form):
    assert picture_key(open_picture(forms(folder)[form])) == picture_key(make_picture(0))


def test_a_picture_comes_by_http(folder):
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert picture_key(open_picture(f"{address}/a.png")) == picture_key(make_picture(0))
        with pytest.raises(NotAnImage, match=r"cannot be fetched.*404"):
            open_picture(f"{address}/b.png")
        server.shutdown()


def test_a_relative_path_is_also_looked_for_beside_the_prompt_file(folder):
    assert open_picture("a.png", folder=folder).size == (64, 48)
    with pytest.raises(NotAnImage, match="does not exist"):
        open_picture("a.png")


@pytest.mark.parametrize(
    ("item", "why"),
    [
        (b"", "is empty"),
        (b"GIF89a not really", "picture"),
        (b"hello, this is text", "not a picture of a known kind"),
        ("data:image/png;base64,%%%", "base64 is damaged"),
        ("data:image/png", "without a comma"),
        ("gs://bucket/a.png", "gs:// is not read"),
        ("/no/such.png", "does not exist"),
        (7, "int 7 is not a picture"),
        ({"type": "image"}, "holds no picture"),
        ({"image": b"x", "max_pixels": 4}, "not a picture of a known kind"),
    ],
)
def test_what_is_no_picture_is_told_with_its_reason(item, why):
    with pytest.raises(NotAnImage, match=why):
        open_picture(item)


def test_a_damaged_file_is_told(folder):
    raw = (folder / "a.png").read_bytes()
    with pytest.raises(NotAnImage, match="damaged picture"):
        open_picture(raw[:60] + b"\x00" * 10 + raw[70:])


def test_bounds_on_pixels_scale_a_picture(folder):
    small = open_picture({"image": str(folder / "a.png"), "max_pixels": 400})
    assert small.size[0] * small.size[1] <= 400
    large = fit_pixels(make_picture(0), 10_000, None)
    assert large.size[0] * large.size[1] >= 10_000
    assert fit_pixels(make_picture(0), 10, 10_000).size == (64, 48)
    with pytest.raises(NotAnImage, match="max_pixels is 'x'"):
        fit_pixels(make_picture(0), None, "x")


def test_a_picture_keeps_the_bytes_it_came_from(folder):
    raw = (folder / "a.png").read_bytes()
    assert picture_bytes(open_picture(raw)) == raw
    url = encode_image_for_rollout_engine(open_picture(raw).convert("P"))
    assert picture_key(
        open_picture(encode_image_for_rollout_engine({"bytes": raw, "path": None}))
    ) == picture_key(make_picture(0))
    assert url.startswith("data:image/png;base64,")


def test_pictures_of_a_conversation_come_in_order(folder):
    path = str(folder / "a.png")
    messages = [
        {"role": "user", "content": [{"type": "image", "image": path}, {"type": "text", "text": "x"}]},
        {"role": "user", "content": [{"type": "image", "image": make_picture(3)}]},
        {"role": "user", "content": "<image>"},
    ]
    found = process_vision_info(messages, None)
    assert [picture_key(p) for p in found["images"]] == [picture_key(make_picture(seed)) for seed in (0, 3)]
    assert found["videos"] is None
    assert process_vision_info([{"role": "user", "content": "x"}]) == {"images": None, "videos": None}
    with pytest.raises(ValueError, match="'video'"):
        process_vision_info([{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}])


def test_spans_collapse_to_one_token_each():
    tokens = [5, 9, 9, 9, 6, 8, 9, 9, 8, 7]
    assert runs_of(tokens, 9) == [(1, 4), (6, 8)]
    assert collapse(tokens, runs_of(tokens, 9), (9,)) == [5, 9, 6, 8, 9, 8, 7]
    assert collapse(tokens, [(1, 4), (5, 9)], (9,)) == [5, 9, 6, 9, 7]

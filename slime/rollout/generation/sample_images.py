"""Converts pictures of samples to token ids, train inputs and request fields, also in later turns.

Samples of one prompt share the pixels of their pictures: `multimodal_train_inputs` is the same object in all
of them, so that it is sent to the trainer once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime.arguments import PluginArgs
from slime.data.media import bare_messages
from slime.rollout.prompt_groups import describe
from slime.utils.media.image_tokens import collapse, encoder_of, images_key, runs_of
from slime.utils.media.pictures import media_url, open_media, picture_key
from slime.utils.processing_utils import load_processor, process_vision_info
from slime.utils.types import Sample

_MAX_URLS = 64
_urls: dict[str, str | dict[str, Any]] = {}  # by the pictures' keys: the samples of a group send the same
_PROBE = [{"role": "user", "content": "?"}]


def pictures_of(sample: Sample) -> list[Any]:
    return list((sample.multimodal_inputs or {}).get("images") or ())


def encode_prompt_with_images(sample: Sample, ids: Sequence[int], processor: Any) -> None:
    """Write the prompt's tokens, spans and train inputs; `ids` has one image token for each picture."""
    encoder = encoder_of(processor)
    pictures = [open_media(item) for item in pictures_of(sample)]
    made = encoder.encode_prompt(ids, pictures)
    sample.tokens, sample.image_spans = made.ids, made.spans
    sample.multimodal_train_inputs, sample.multimodal_train_input_id = made.inputs, made.key


def append_with_images(
    sample: Sample, ids: Sequence[int], pictures: Sequence[Any], processor: Any, *, text: str = ""
) -> None:
    """Append tokens that the policy did not write, with the pictures that they show; they are not trained.

    `ids` has one image token for each picture. The next request of the sample sends all pictures so far.
    """
    encoder = encoder_of(processor)
    new = [open_media(item) for item in pictures]
    made = encoder.encode_prompt(ids, new, start=len(sample.tokens))
    sample.append_response_tokens(tokens=made.ids, trainable=False, text=text or None)
    if not new:
        return
    everything = [*map(open_media, pictures_of(sample)), *new]
    sample.image_spans = [*(sample.image_spans or []), *made.spans]
    sample.multimodal_inputs = {**(sample.multimodal_inputs or {}), "images": everything}
    encoded = [encoder.encode(picture) for picture in everything]
    sample.multimodal_train_inputs = encoder.join(encoded)
    sample.multimodal_train_input_id = images_key(image.key for image in encoded)


def append_messages(
    sample: Sample,
    messages: list[dict[str, Any]],
    tokenizer: Any,
    processor: Any = None,
    *,
    tools: list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> None:
    """Append an observation: new messages, rendered with the model's template up to where it answers.

    Parts of messages may be pictures, in any form that prompt files take. What the sample holds already is
    not rendered again.
    """
    text = render_new(messages, tokenizer, tools=tools, kwargs=kwargs)
    ids = tokenizer.encode(text, add_special_tokens=False)
    pictures = process_vision_info(messages)["images"] or []
    if pictures and processor is None:
        raise ValueError("an observation holds pictures, but the model has no processor: it reads text only.")
    if processor is None:
        sample.append_response_tokens(tokens=ids, trainable=False, text=text)
    else:
        append_with_images(sample, ids, pictures, processor, text=text)


def render_new(
    messages: list[dict[str, Any]],
    tokenizer: Any,
    *,
    tools: list[Any] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> str:
    """The text of messages that follow others, with what asks for the next answer behind it."""
    options = {"tools": tools, "tokenize": False, **(kwargs or {})}
    before: str = tokenizer.apply_chat_template(_PROBE, **options)
    after: str = tokenizer.apply_chat_template(
        [*_PROBE, *bare_messages(messages)], add_generation_prompt=True, **options
    )
    if not after.startswith(before):
        raise ValueError("the chat template writes a message otherwise once others follow it.")
    return after.removeprefix(before)


def wire_form(args: PluginArgs, sample: Sample) -> tuple[list[int], tuple[Any, ...], frozenset[int]]:
    """Ids with one token per picture or video, these for a request, and ids that no answer may hold."""
    pictures = pictures_of(sample)
    if not pictures:
        return sample.tokens, (), frozenset()
    processor = load_processor(str(args.hf_checkpoint))
    if processor is None:
        raise ValueError(f"--hf-checkpoint {args.hf_checkpoint} has no processor: it takes no images.")
    encoder, spans = encoder_of(processor), sample.image_spans
    spans = runs_of(sample.tokens, encoder.image_token_id) if spans is None else spans
    if len(spans) != len(pictures):
        found = f"{describe(sample)} has {len(pictures)} images and tokens of {len(spans)}"
        raise ValueError(f"{found}: set image_spans, or append images with append_with_images.")
    urls = tuple(_url(item) for item in pictures)
    return collapse(sample.tokens, spans, encoder.media_ids), urls, encoder.media_ids


def _url(item: Any) -> str | dict[str, Any]:
    if isinstance(item, str):
        return item
    picture = open_media(item)
    key = picture_key(picture)
    if key not in _urls:
        if len(_urls) >= _MAX_URLS:
            _urls.clear()
        _urls[key] = media_url(picture)
    return _urls[key]

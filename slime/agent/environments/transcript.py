"""One player of an episode: its sample, to which observations and responses are appended token by token.

What the policy wrote is never tokenised again. Each observation is rendered alone, with the model's own chat
template (or, without --apply-chat-template, as plain text), and appended to the ids that exist.
"""

from __future__ import annotations

import functools
import hashlib
from typing import Any

from slime.agent.environments.protocol import EnvironmentFailure, Observation
from slime.agent.rendering import Renderer
from slime.arguments import PluginArgs
from slime.catalog.vision import why_no_images
from slime.rollout.generation.generate_request import PromptError, token_budget
from slime.rollout.generation.sample_images import append_with_images, encode_prompt_with_images
from slime.utils.errors import RunStopped
from slime.utils.media.image_tokens import encoder_of
from slime.utils.media.pictures import NotAnImage, open_picture, picture_key
from slime.utils.models.model_config import read_config
from slime.utils.processing_utils import load_processor
from slime.utils.types import Sample

_END_OF_THOUGHT = "</think>"
_PICTURE = "<image>"  # in the text of an observation: the place of the next image


class ObservationRenderer:
    """Turns observations into token ids, with the chat template or as plain text."""

    def __init__(self, args: PluginArgs, tokenizer: Any):
        self.tokenizer = tokenizer
        self._renderer = None
        if args.apply_chat_template:
            kwargs = args.apply_chat_template_kwargs or {}
            self._renderer = Renderer(tokenizer, template_kwargs=kwargs, history="extend")
        self._special = frozenset(tokenizer.all_special_ids)

    def first(self, observation: Observation) -> list[int]:
        if self._renderer is None:
            _check_text_only(observation)
            parts = [part for part in (observation.system, observation.text) if part]
            return self._encode("\n".join(parts))
        messages = [_message(observation)]
        if observation.system:
            messages.insert(0, {"role": "system", "content": observation.system})
        return self._renderer.first_prompt(messages)

    def next(self, observation: Observation, last_id: int) -> list[int]:
        """Return the ids that follow a response which ends in `last_id`."""
        if self._renderer is None:
            _check_text_only(observation)
            return self._encode(observation.text)
        stop_id = last_id if last_id in self._special else None
        ids = self._renderer.extension([_message(observation)], stop_id=stop_id)
        if ids is None:
            raise RunStopped(
                "--apply-chat-template: the model's chat template changes earlier responses, so that no "
                "message can be appended to one. Train this model on episodes of one turn, or change its "
                "template."
            )
        return ids

    def action(self, ids: list[int]) -> str:
        """Return what an environment gets: the text of a response without thoughts and special tokens."""
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text.rpartition(_END_OF_THOUGHT)[2].strip() if _END_OF_THOUGHT in text else text

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))


def _check_text_only(observation: Observation) -> None:
    if observation.images:
        raise RunStopped(
            "--env shows images, which only a chat template can place: add --apply-chat-template"
        )


def _message(observation: Observation) -> dict[str, Any]:
    if not observation.images:
        return {"role": observation.role, "content": observation.text}
    texts = observation.text.split(_PICTURE)
    if len(texts) == 1:  # no place is named: images come first
        texts = [*[""] * len(observation.images), observation.text]
    if len(texts) != len(observation.images) + 1:
        raise EnvironmentFailure(
            f"an observation has {len(observation.images)} images and {len(texts) - 1} times {_PICTURE}"
        )
    parts = [part for text in texts for part in ({"type": "image"}, {"type": "text", "text": text})][1:]
    return {"role": observation.role, "content": [part for part in parts if part.get("text") != ""]}


def _pictures(observation: Observation) -> list[Any]:
    try:
        return [open_picture(image) for image in observation.images]
    except NotAnImage as error:
        raise EnvironmentFailure(f"an observation has an invalid image: {error}") from error


@functools.lru_cache(maxsize=4)
def _processor(checkpoint: str) -> Any:
    """Return the processor that turns images into tokens; RunStopped if the model reads no images."""
    why = why_no_images(read_config(checkpoint).get("model_type"))
    found = None if why else load_processor(checkpoint)
    if found is None:
        raise RunStopped(
            f"--env shows images, but --hf-checkpoint {checkpoint} takes none: {why or 'no processor'}."
        )
    return found


class Transcript:
    """The sample of one player, and its turns."""

    def __init__(self, args: PluginArgs, sample: Sample, renderer: ObservationRenderer):
        self.args, self.sample, self.renderer = args, sample, renderer
        self.turns: list[tuple[int, int, float]] = list(sample.turn_rewards or ())

    def read(self, observation: Observation, longest: int | None, context: int | None) -> bool:
        """Append an observation; False: there is no room for it and a response."""
        sample, pictures = self.sample, _pictures(observation)
        processor = _processor(str(self.args.hf_checkpoint)) if pictures else None
        if not sample.tokens:
            ids = self.renderer.first(observation)
            if not ids:
                raise PromptError("the environment's first observation has no tokens")
            sample.prompt, sample.tokens = self.renderer.tokenizer.decode(ids), ids
            if pictures:
                sample.multimodal_inputs = {"images": pictures}
                encode_prompt_with_images(sample, ids, processor)
            return True
        ids = self.renderer.next(observation, sample.tokens[-1])
        room = token_budget(self.args, sample, longest, context)
        of_pictures = sum(len(encoder_of(processor).encode(one).ids) - 1 for one in pictures)
        if room is not None and len(ids) + of_pictures >= room:
            return False
        text = self.renderer.tokenizer.decode(ids)
        if pictures:
            append_with_images(sample, ids, pictures, processor, text=text)
        elif ids:
            sample.append_response_tokens(self.args, tokens=ids, trainable=False, text=text)
        return True

    def end_turn(self, start: int, reward: float) -> None:
        self.turns.append((start, self.sample.response_length, reward))
        self.sample.turn_rewards = list(self.turns)

    def add_to_last_turn(self, reward: float) -> None:
        """Add a score of the whole episode, or what other players' moves brought, to the last turn."""
        start, end, own = self.turns[-1]
        self.turns[-1] = (start, end, own + reward)
        self.sample.turn_rewards = list(self.turns)

    @property
    def total(self) -> float:
        return float(sum(reward for _, _, reward in self.turns))

    def text_since(self, start: int) -> str:
        """Return what the policy wrote in the turn that started at `start` of the response."""
        sample = self.sample
        return self.renderer.action(sample.tokens[len(sample.tokens) - sample.response_length + start :])


def fingerprint(observation: Observation) -> str:
    """Return a digest that tells whether a replayed environment reached the same state again."""
    seen = [str(observation.player), observation.text, *map(picture_key, _pictures(observation))]
    return hashlib.blake2b(" ".join(seen).encode(), digest_size=8).hexdigest()

"""Checks a run's arguments for the embedded engine, and refuses models that it cannot serve."""

from __future__ import annotations

from typing import Any

from slime.arguments.core.draft import Draft

NEEDS_OTHER = "cannot run on the embedded engine's attention function; use --rollout-engine sglang"
_SERVED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def why_meant(draft: Draft) -> str | None:
    """Return why the flags select this engine; None: they do not."""
    return None


def interpreter(given: str | None, reason: str) -> dict[str, str]:
    """Return flags that name the engine's interpreter: it runs in ours, so there are none."""
    return {}


def make_reproducible(draft: Draft) -> None:
    """Compute requests one at a time: the last bits of log-probs depend on the other requests in a pass."""
    requests = draft.limits.setdefault("embedded-requests", 1)
    if requests != 1:
        raise ValueError(
            f"--limits embedded-requests={requests:g} with --deterministic-mode: log-probs of requests "
            "that are computed together depend on which they are, and that on timing; leave it out, or do "
            "without --deterministic-mode."
        )


def check_parallel_sizes(draft: Draft) -> None:
    """Accept every run: such an engine has one rank."""


def check_adapter_sync(draft: Draft, own_requests: str | None) -> None:
    """Accept every run: the model stays when memory is released, and all requests get the adapters."""


def lacks_images_of(model_type: str, videos: bool = False) -> bool:
    """Return whether the engine cannot serve this type of vision-language model, or its videos."""
    return False


def unserved_layers(config: Any) -> list[str]:
    """Return the kinds of layers in a model's config that this engine cannot compute."""
    return sorted(set(vars(config).get("layer_types") or ()) - _SERVED_LAYERS)


def why_unserved(config: Any) -> str | None:
    """Return why this engine cannot serve a model of such a config; None: it can."""
    kinds = unserved_layers(config)
    return f"a {config.model_type} has {', '.join(kinds)} layers and {NEEDS_OTHER}" if kinds else None

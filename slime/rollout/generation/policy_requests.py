"""Refuses requests for trained tokens whose sampling differs from what the trainer computes.

Our own requests pass `check_sampling` when they are built. `slime.utils.http_utils` shows requests that a
user's function posts to the `PolicyRequests` of the running task. Requests of other clients are seen only by
an engine: the embedded one counts them, and the rollout manager warns.
"""

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from slime.arguments import PluginArgs
from slime.arguments.groups.trained_sampling import engines_report_nucleus, refusal
from slime.rollout.generation.scope import current_scope
from slime.rollout.prompt_groups import describe
from slime.utils import http_utils, top_p
from slime.utils.errors import RunStopped
from slime.utils.types import Sample
from slime.wire.protocol import wrong_token_id

logger = logging.getLogger(__name__)

# Paths at which engines generate; OpenAI-style ones have the sampling parameters at the top of the body.
NATIVE_PATH = "/generate"
OPENAI_PATHS = ("/v1/completions", "/v1/chat/completions")

_trained: ContextVar[bool] = ContextVar("slime_trained_requests", default=True)
_current: ContextVar["PolicyRequests | None"] = ContextVar("slime_policy_requests", default=None)


class SamplingRefused(RunStopped, ValueError):
    """A request for trained tokens asks to draw them from another distribution than the trainer's."""


class not_trained:  # used like a function: with not_trained()
    """Marks requests in this block as not for training: evaluation, rewards, baselines."""

    def __enter__(self) -> None:
        self._before = _trained.get()
        _trained.set(False)

    def __exit__(self, *_: object) -> None:
        _trained.set(self._before)  # no reset: a stream may be closed in another context than it started in


def is_trained() -> bool:
    """Return whether tokens that the running task requests may be trained on."""
    return _trained.get()


def requests_of_call() -> "PolicyRequests | None":
    """Return the observer of the running generate call; None outside of one."""
    return _current.get()


def check_sampling(args: PluginArgs, params: Mapping[str, Any]) -> None:
    """Raise SamplingRefused if trained tokens must not be drawn with `params`; warn of a temperature."""
    if not _trained.get() or args.allow_sampling_mismatch or args.debug_rollout_only:
        return
    why = refusal_of(args, params)
    if why is not None:
        error = SamplingRefused(f"a request of the generate function for training: {why}")
        requests = _current.get()
        if requests is not None:
            requests.refused = error
        raise error
    temperature = params.get("temperature", 1.0)  # an engine's default
    if isinstance(temperature, (int, float)) and temperature != args.rollout_temperature:
        _warn_of_temperature(temperature, args.rollout_temperature)


def refusal_of(args: PluginArgs, params: Mapping[str, Any]) -> str | None:
    can_report, custom = engines_report_nucleus(args), params.get("custom_params")
    reported = can_report and isinstance(custom, Mapping) and bool(custom.get(top_p.REQUEST_FIELD))
    ask = f"ask for the kept ids with sampling_params['custom_params'] = {{{top_p.REQUEST_FIELD!r}: True}}"
    return refusal(
        params,
        spelling=lambda name: f"sampling_params[{name!r}]",
        vocab_size=args.vocab_size,
        nucleus_reported=reported,
        fix=ask if can_report else "use engines that the run starts itself, which report them",
    )


@functools.cache
def _warn_of_temperature(asked: float, computed: float) -> None:
    what = f"a request of the generate function asks for temperature {asked:g}, but the trainer computes"
    logger.warning("%s log-probs at --rollout-temperature %g: both will differ.", what, computed)


class PolicyRequests:
    """Observes one call of a generate function: what was refused, and which weight versions responded."""

    def __init__(self, args: PluginArgs) -> None:
        self.args = args
        router = f"{args.sglang_router_ip}:{args.sglang_router_port}"
        self._addresses = {_address(urlsplit(url).netloc) for url in args.engine_urls} | {_address(router)}
        self.refused: SamplingRefused | None = None
        self.versions: set[str] = set()  # weight versions of the responses
        self.got_nucleus = False  # a response for training named the ids that its tokens were drawn from

    @contextlib.contextmanager
    def entered(self) -> Iterator["PolicyRequests"]:
        """Observe the requests of this task and its children; a refusal is always raised at the end."""
        token = _current.set(self)
        try:
            with http_utils.observed(self):
                yield self
        except Exception as error:
            if self.refused is not None and error is not self.refused:
                raise self.refused from error
            raise
        finally:
            _current.reset(token)
        if self.refused is not None:
            raise self.refused

    @contextlib.contextmanager
    def elsewhere(self, *, trained: bool) -> Iterator[None]:
        """Observe requests that another thread sends for this call, as an endpoint for agents does."""
        before, was_trained = _current.get(), _trained.get()
        _current.set(self)
        _trained.set(trained)
        try:
            with http_utils.observed(self):
                yield
        finally:  # no reset: a stream may be closed in another context than it started in
            _current.set(before)
            _trained.set(was_trained)

    def sending(self, url: str, payload: Any) -> None:
        """Check a request that `http_utils` is about to post."""
        if not self._generates(url) or not isinstance(payload, Mapping):
            return
        ids, size = payload.get("input_ids"), self.args.vocab_size
        for prompt in ids if isinstance(ids, list) and ids and isinstance(ids[0], list) else [ids]:
            wrong = wrong_token_id(prompt, size) if isinstance(prompt, (list, tuple)) else None
            if wrong is not None:  # it would crash some engines
                problem = f"not sent: input_ids has token id {wrong}, the vocabulary has {size} ids"
                raise http_utils.HttpError(400, problem, url)
        params = payload.get("sampling_params")
        if urlsplit(str(url)).path.rstrip("/") in OPENAI_PATHS:
            params = payload
        for one in params if isinstance(params, list) else [params]:
            check_sampling(self.args, one if isinstance(one, Mapping) else {})

    def answered(self, url: str, answer: Any) -> None:
        """Record the weight versions and tokens of a response."""
        if not self._generates(url):
            return
        scope = current_scope()
        for one in answer if isinstance(answer, list) else [answer]:
            meta = one.get("meta_info") if isinstance(one, Mapping) else None
            if not isinstance(meta, Mapping):
                continue
            if meta.get("weight_version") is not None:
                spans = meta.get("weight_versions") or [{"version": meta["weight_version"]}]
                self.versions.update(str(span["version"]) for span in spans)
            if not is_trained():
                continue
            # Tokens of requests that the function posted itself; ours are counted when sent.
            if scope is not None and meta.get("id") not in scope.rids:
                number = meta.get("completion_tokens")
                scope.note_tokens(number if isinstance(number, int) else 0)
            self.got_nucleus |= top_p.is_in(meta)

    def check_nucleus(self, sample: Sample) -> None:
        """Raise if a function got the ids that its tokens were drawn from and did not record them."""
        trained = any(sample.loss_mask or [1] * sample.response_length)
        if self.got_nucleus and trained and sample.rollout_top_p_token_offsets is None:
            found = f"the generate function got the ids that the tokens of {describe(sample)} were drawn from"
            hint = "pass the answer's meta_info to sample.append_response_tokens"
            raise SamplingRefused(f"{found}, but the sample does not carry them: {hint}.")

    def _generates(self, url: str) -> bool:
        parts, paths = urlsplit(str(url)), (NATIVE_PATH, *OPENAI_PATHS)
        return parts.path.rstrip("/") in paths and _address(parts.netloc) in self._addresses


def _address(netloc: str) -> str:
    return netloc.rpartition("@")[2].replace("localhost", "127.0.0.1").lower()

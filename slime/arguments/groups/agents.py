"""Flags and rules of episodes: the environment, its budgets and deadlines, and credit by turn."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs, option_of
from slime.arguments.groups.algorithm import ADVANTAGES, COMPUTES_ADVANTAGES
from slime.arguments.groups.rewards import SHAPED
from slime.catalog.environments import ENVIRONMENTS, HELD_OUT, OWN, TRAINING, read_choices, source_of
from slime.catalog.estimators import ESTIMATORS

ENV_ITEMS = 10_000  # that an environment makes for training; --prompt-data env:...#train:N has another number
EPISODE_FUNCTION = "slime.agent.environments.episode.generate"
_FAMILIES = "; ".join(f"{name}: {row.help}" for name, row in ENVIRONMENTS.items() if name != OWN)

# -- when flags have an effect
ENV = needs("env")
CONTINUES = needs("partial_rollout")


@dataclass
class AgentFlags:
    """Episodes and environments."""

    env: str | None = flag(
        None,
        "environment that asks, answers and scores: FAMILY:TASK, several as TASK=WEIGHT,TASK, or a class of "
        f"yours, module:Class. {_FAMILIES}",
        metavar="NAME",
    )
    env_args: dict = flag(
        {},
        'its options by task, "*" for all, as JSON: {"gcd": {"max_value": 50}}',
        metavar="JSON",
        only_with=ENV,
    )
    eval_env_num_items: int = flag(64, "number of held-out items of each task", ge=1, only_with=ENV)
    max_turns: int | None = flag(None, "longest episode in turns of the policy", ge=1, only_with=ENV)
    turn_max_response_len: int | None = flag(
        None,
        "longest turn in tokens; --rollout-max-response-len limits the whole episode",
        ge=1,
        only_with=ENV,
    )
    partial_episodes: str = flag(
        "continue",
        "what happens to an episode that --partial-rollout interrupts",
        choices=("continue", "restart"),
        only_with=CONTINUES,
    )
    agent_client_sampling: str = flag(
        "asked",
        "sampling of a turn whose client asks for parameters of its own: as asked (the turn is not "
        "trained), or as the run samples",
        choices=("asked", "run"),
    )
    turn_discount: float | None = flag(
        None,
        "credit by turn: a turn gets its own reward and later ones discounted by this per turn. Default: "
        "the episode's reward",
        ge=0,
        le=1,
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES, SHAPED),
    )
    max_tokens_in_flight: int | None = flag(
        None,
        "most tokens of all requests in flight, prompts and responses; other requests wait. Default: no "
        "limit",
        ge=1,
    )


def environment(draft: Draft) -> None:
    """What --env implies: who generates, and where training and evaluation get their items from."""
    if draft.env is None:
        return
    choices = read_choices(draft.env)
    _check_options(draft, [choice.short for choice in choices])
    if draft.custom_generate_function_path is None:
        draft.derive("custom_generate_function_path", EPISODE_FUNCTION, "--env plays episodes")
    if draft.rollout_max_response_len is None:
        raise ValueError(
            "--env needs --rollout-max-response-len: the longest episode in tokens, what the environment "
            "says included."
        )
    if draft.multimodal_keys:
        raise ValueError(
            "--multimodal-keys with --env: the environment shows images itself (Observation.images); remove "
            "the flag, and name files in the metadata of rows."
        )
    if draft.prompt_data is None:
        for name in ("input_key", "label_key", "prompt_template"):
            if draft.was_given(name):
                raise ValueError(
                    f"{option_of(name)} is given, but --env {draft.env} makes its items itself: "
                    "remove it, or name a file with --prompt-data."
                )
        draft.derive("prompt_data", source_of(choices, TRAINING, ENV_ITEMS), "--env makes its items")
    _evaluation(draft)


def _evaluation(draft: Draft) -> None:
    own_items = not draft.was_given("prompt_data")
    if draft.eval_interval is None or draft.eval_config or draft.eval_prompt_data or not own_items:
        return
    choices = read_choices(draft.env)
    words = []
    for choice in choices:
        words += [choice.short, source_of([choice], HELD_OUT, draft.eval_env_num_items)]
    draft.derive("eval_prompt_data", words, "held-out items of the environment, each task apart")


def _check_options(draft: Draft, tasks: list[str]) -> None:
    for task, options in draft.env_args.items():
        if task != "*" and task not in tasks:
            raise ValueError(
                f"--env-args has {task!r}: its keys are tasks of --env ({', '.join(tasks)}) or '*'."
            )
        if not isinstance(options, dict):
            raise ValueError(f"--env-args: the options of {task!r} must be an object, not {options!r}.")


def turn_credit(draft: Draft) -> None:
    """Estimators that discount by token have a discount of their own."""
    discounts = ESTIMATORS[draft.advantage_estimator].uses_gamma
    if draft.turn_discount not in (None, 1.0) and discounts:
        estimator = draft.advantage_estimator
        raise ValueError(
            f"--turn-discount is {draft.turn_discount:g}, but --advantage-estimator {estimator} discounts by "
            "token: use --turn-discount 1, which puts each turn's reward on its last token, with --gamma."
        )

"""Flags and rules of episodes: the environment, its budgets and deadlines, and credit by turn."""

from dataclasses import dataclass

from slime.arguments.core.draft import Draft
from slime.arguments.core.flag import flag, needs, option_of
from slime.arguments.groups.algorithm import ADVANTAGES, COMPUTES_ADVANTAGES
from slime.arguments.groups.rewards import SHAPED
from slime.catalog.environments import ENVIRONMENTS, HELD_OUT, OWN, TRAINING, read_choices, source_of
from slime.catalog.estimators import ESTIMATORS

ENV_ITEMS = 10_000  # training items of an environment; --prompt-data env:...#train:N sets another number
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
        {}, 'its options by task, "*" for all, as JSON: {"gcd": {"max_value": 50}}', only_with=ENV
    )
    eval_env_num_items: int = flag(64, "number of held-out items of each task", ge=1, only_with=ENV)
    max_turns: int | None = flag(None, "longest episode in turns of the policy", ge=1, only_with=ENV)
    turn_max_response_len: int | None = flag(
        None, "longest turn in tokens; --rollout-max-response-len limits the episode", ge=1, only_with=ENV
    )
    partial_episodes: str = flag(
        "continue",
        "what to do with an interrupted episode",
        choices=("continue", "restart"),
        only_with=CONTINUES,
    )
    agent_client_sampling: str = flag(
        "asked",
        "sampling of a turn whose client sends its own parameters: the client's (not trained), or the run's",
        choices=("asked", "run"),
    )
    turn_discount: float | None = flag(
        None,
        "credit by turn: its own reward and later ones, discounted. Default: the episode's reward",
        ge=0,
        le=1,
        only_with=(ADVANTAGES, COMPUTES_ADVANTAGES, SHAPED),
    )
    max_tokens_in_flight: int | None = flag(
        None, "most tokens of all requests in flight; others wait. Default: no limit", ge=1
    )


def environment(draft: Draft) -> None:
    """Derive from --env the generate function and the sources of training and evaluation items."""
    if draft.env is None:
        return
    choices = read_choices(draft.env)
    tasks = [choice.short for choice in choices]
    for task, options in draft.env_args.items():
        if task not in ("*", *tasks):
            raise ValueError(f"--env-args has {task!r}: its keys are tasks ({', '.join(tasks)}) or '*'.")
        if not isinstance(options, dict):
            raise ValueError(f"--env-args: the options of {task!r} must be an object, not {options!r}.")
    if draft.custom_generate_function_path is None:
        draft.derive("custom_generate_function_path", EPISODE_FUNCTION, "--env plays episodes")
    if draft.rollout_max_response_len is None:
        raise ValueError("--env needs --rollout-max-response-len: the longest episode in tokens.")
    if draft.prompt_data is not None and draft.was_given("prompt_data"):
        return
    for name in ("input_key", "label_key", "prompt_template"):
        if draft.was_given(name):
            option = option_of(name)
            raise ValueError(
                f"{option} is given, but --env makes its items itself: name a file with --prompt-data."
            )
    draft.derive("prompt_data", source_of(choices, TRAINING, ENV_ITEMS), "--env makes its items")
    if draft.eval_interval is not None and not draft.eval_config and not draft.eval_prompt_data:
        sources = [(c.short, source_of([c], HELD_OUT, draft.eval_env_num_items)) for c in choices]
        words = [word for source in sources for word in source]
        draft.derive("eval_prompt_data", words, "held-out items of the environment, each task apart")


def turn_credit(draft: Draft) -> None:
    """Refuse --turn-discount with estimators that discount by token, which have their own discount."""
    estimator = draft.advantage_estimator
    if draft.turn_discount not in (None, 1.0) and ESTIMATORS[estimator].uses_gamma:
        raise ValueError(
            f"--turn-discount is {draft.turn_discount:g}, but --advantage-estimator {estimator} discounts by "
            "token: use --turn-discount 1, which puts each turn's reward on its last token, with --gamma."
        )

"""`Args`, the settings of one run: flat, frozen, picklable, and aware of where each value came from."""

import copy
from collections.abc import Sequence
from typing import Any, Never, NoReturn

from slime.arguments.all_flags import Flags, all_specs
from slime.arguments.core.draft import Draft
from slime.arguments.groups.eval_config import EvalDatasetConfig
from slime.arguments.groups.topology import Topology, plain_topology
from slime.catalog.estimators import ESTIMATORS


class Args(Flags):
    """Every flag is an attribute: `--rollout-batch-size 32` is `args.rollout_batch_size == 32`.

    It never changes after `parse_args`; facts that become known during a run are in `RunInfo`.
    """

    eval_datasets: list[EvalDatasetConfig]  # from --eval-config or --eval-prompt-data; empty: no evaluation
    sglang_options: list[str]  # SGLang's own flags (--sglang-...) as arguments of its command line
    router_options: list[str]  # flags of SGLang's router (--router-...), likewise
    engine_topology: Topology  # which engines serve which models

    # Apart from the values, so that vars(args) is exactly the settings.
    __slots__ = ("_sources", "_warnings")
    _sources: dict[str, str]
    _warnings: tuple[str, ...]

    def __init__(self, values: dict[str, Any], sources: dict[str, str], warnings: Sequence[str] = ()):
        vars(self).update(values)
        object.__setattr__(self, "_sources", dict(sources))
        object.__setattr__(self, "_warnings", tuple(warnings))

    @classmethod
    def of(cls, draft: Draft) -> "Args":
        """Freeze the settings of a draft."""
        return cls(draft.values, draft.sources, draft.warnings)

    def reopen(self, *, training_loop: str) -> Draft:
        """Return these settings as a draft, with their sources, so that rules can change them."""
        draft = Draft(all_specs(), training_loop=training_loop)
        draft.values, draft.sources, draft.warnings = self.to_dict(), self.sources, list(self.warnings)
        return draft

    @property
    def sources(self) -> dict[str, str]:
        """Source of each value: "default", "file run.yaml", "command line" or "derived: <rule>"."""
        return dict(self._sources)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings about these settings, which `parse_args` logs before the run."""
        return self._warnings

    def to_dict(self, *, hide_secrets: bool = False) -> dict[str, Any]:
        """Return a deep copy of all values, free to change; `hide_secrets`: safe to write to a file."""
        values = copy.deepcopy(vars(self))
        if hide_secrets:
            secret = [name for name, spec in all_specs().items() if spec.info.secret]
            values |= {name: "********" for name in secret if values[name] is not None}
        return values

    def replace(self, **changes: Any) -> "Args":
        """A copy with other values. Rules are not run again: give every value that the change implies."""
        unknown = sorted(set(changes) - set(vars(self)))
        if unknown:
            raise ValueError(f"args has no {', '.join(unknown)}: replace() only changes flags")
        sources = self.sources | dict.fromkeys(changes, "derived: replaced in code")
        return Args(self.to_dict() | changes, sources, self._warnings)

    def __setattr__(self, name: str, value: Never) -> NoReturn:
        instead = f"Use args.replace({name}=...) for a copy."
        raise AttributeError(f"args.{name} cannot be set: arguments are fixed after parsing. {instead}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args.{name} cannot be deleted: arguments are fixed after parsing.")

    def __reduce__(self) -> tuple[Any, ...]:
        return Args, (vars(self), self._sources, self._warnings)

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, Args) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # how Python says that objects have no hash

    def __repr__(self) -> str:
        shown = self.to_dict(hide_secrets=True).items()
        changed = (f"{k}={v!r}" for k, v in shown if self._sources.get(k) != "default")
        return f"Args({', '.join(changed)})"


def default_args(**changes: Any) -> Args:
    """Return every flag at its default except those named, to build a trainer alone; no rule runs."""
    values = {name: copy.copy(spec.default) for name, spec in all_specs().items()} | changes
    derived = {
        "policy_loss_type": ESTIMATORS[values["advantage_estimator"]].policy_loss,
        "loss_reduction": "token_mean" if values["calculate_per_token_loss"] else "rollout_mean",
        "eps_clip_high": values["eps_clip"],
        "rs_lower": 1 / values["rs_upper"],
        "eval_datasets": [],
        "sglang_options": [],
        "router_options": [],
        "engine_topology": plain_topology(values["hf_checkpoint"], 1, 1),
        "start_from": values["hf_checkpoint"],
        "critic_overrides": {},
        "megatron_config": {},
    }
    values |= {name: value for name, value in derived.items() if values.get(name) is None}
    unknown = sorted(set(changes) - set(all_specs()) - set(derived))
    assert not unknown, f"no such flag: {', '.join(unknown)}"
    sources = dict.fromkeys(values, "default") | dict.fromkeys(changes, "derived: set in code")
    return Args(values, sources)

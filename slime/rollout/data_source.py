"""Gives out prompt groups: from the dataset, epoch after epoch, and from a buffer of returned groups.

The order is: buffer first (partial and finished-but-unused groups), then the dataset. `state_dict` holds all
of it in plain types, so a resumed run hands out exactly what the interrupted one would have.
"""

import abc
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.arguments import PluginArgs, with_defaults
from slime.catalog.datasets import ENDINGS
from slime.data.dataset import Dataset
from slime.rollout.curriculum import PROMPT_KEY, Curriculum
from slime.rollout.ledger import Ledger
from slime.rollout.prompt_formats import training_format
from slime.rollout.prompt_groups import (
    Group,
    Outcome,
    check_groups,
    copy_sample,
    group_from_plain,
    group_to_plain,
)
from slime.utils.files.torch_files import load_torch_file
from slime.utils.misc import load_function
from slime.utils.packed_samples import references_in
from slime.utils.plugin_errors import plugin_call, wrong_return
from slime.utils.processing_utils import load_processor, load_tokenizer
from slime.utils.stored_arrays import StoredArray
from slime.utils.types import Sample, flatten_samples

logger = logging.getLogger(__name__)

STATE_FORMAT = 1
_MAX_DROPPED = 10_000  # groups that wait to be recorded
_COUNTERS = ("sample_offset", "epoch_id", "sample_group_index", "sample_index")  # of the cursor


class DataSource(abc.ABC):
    """The interface of a data source. Overriding `settle` is optional."""

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[Group]:
        """Return `num_samples` prompt groups, each with n_samples_per_prompt samples."""

    @abc.abstractmethod
    def add_samples(self, samples: list[Group]) -> None:
        """Take groups back, to be handed out again. A source that cannot raises NotImplementedError."""

    @abc.abstractmethod
    def save(self, rollout_id: int) -> None: ...

    @abc.abstractmethod
    def load(self, rollout_id: int | None = None) -> None: ...

    @abc.abstractmethod
    def __len__(self) -> int: ...

    def settle(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        """Record the outcome of groups that will not return."""
        return


@dataclass(frozen=True, slots=True)
class Settled:
    """A group that left the run without being trained on, and why."""

    group: Group
    outcome: Outcome
    reason: str | None


class CountingJournal:
    """Counts the events of prompt groups and reports them to the ledger.

    `new` groups came from the dataset, `reissued` ones out of the buffer. Each of them ends once: in the
    buffer (`returned`), in a batch (`trained`), or outside the run (`filtered`, `failed`).
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ledger: Ledger | None = None
        self._dropped: deque[Settled] = deque(maxlen=_MAX_DROPPED)
        self._unneeded: list[StoredArray] = []

    def restore(self, counts: dict[str, int] | None) -> None:
        """Continue from the totals of a checkpoint."""
        self.counts = Counter(counts or {})
        self._dropped.clear()

    def issued(self, groups: Sequence[Group], *, from_buffer: bool) -> None:
        self.counts["reissued" if from_buffer else "new"] += len(groups)
        if self.ledger is not None:
            self.ledger.issued(groups, from_buffer=from_buffer)

    def returned(self, groups: Sequence[Group]) -> None:
        self.counts["returned"] += len(groups)
        if self.ledger is not None:
            self.ledger.returned(groups)

    def consumed(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        self.counts[outcome] += len(groups)
        if outcome != "trained":
            self._dropped.extend(Settled(group, outcome, reason) for group in groups)
            self._unneeded += [a for sample in flatten_samples(groups) for a in references_in(sample)]
        if self.ledger is not None:
            self.ledger.consumed(groups, outcome, reason)

    def drain_dropped(self) -> list[Settled]:
        """Return the groups that were dropped since the last call."""
        return [self._dropped.popleft() for _ in range(len(self._dropped))]

    def drain_unneeded(self) -> list[StoredArray]:
        """Return the stored arrays of groups that were dropped since the last call."""
        found, self._unneeded = self._unneeded, []
        return found


def follow(data_source: Any, ledger: Ledger) -> None:
    """Make any data source report to the ledger: through its journal, or through wrapped methods."""
    journal = getattr(data_source, "journal", None)  # a user's source may have none
    if isinstance(journal, CountingJournal):
        journal.ledger = ledger
        return
    get_samples, add_samples = data_source.get_samples, data_source.add_samples

    def get_and_report(num_samples: int) -> list[Group]:
        groups = check_groups(get_samples(num_samples))
        ledger.issued(groups, from_buffer=None)
        return groups

    def add_and_report(samples: list[Group]) -> None:
        add_samples(samples)
        ledger.returned(samples)

    try:
        data_source.get_samples, data_source.add_samples = get_and_report, add_and_report
    except AttributeError:  # __slots__
        logger.info(
            "%s accepts no attributes: the ledger will contain only groups that are trained on",
            type(data_source),
        )


class RolloutDataSource(DataSource):
    """Gives out groups from the dataset in the order of each epoch, without end."""

    def __init__(self, args: PluginArgs):
        self.args = with_defaults(args)
        self.epoch_id = 0
        self.sample_group_index = 0  # next group's index
        self.sample_index = 0  # next sample's index, unique over the run
        self.sample_offset = 0  # how many prompts of this epoch have been handed out
        self.metadata: dict[str, Any] = {}
        self.journal = CountingJournal()
        self.dataset = build_dataset(args) if args.rollout_global_dataset else None
        self.curriculum: Curriculum | None = None
        if self.args.curriculum and self.dataset is not None:
            self.curriculum = Curriculum(self.args, self.args.curriculum, self.dataset)
        self._order_epoch()

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = [self._make_group(prompt) for prompt in self._next_prompts(num_samples)]
        self.journal.issued(groups, from_buffer=False)
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        raise NotImplementedError(f"{type(self).__name__} has no buffer; use RolloutDataSourceWithBuffer.")

    def settle(self, groups: Sequence[Group], outcome: Outcome, reason: str | None = None) -> None:
        self.journal.consumed(groups, outcome, reason)
        if self.curriculum is not None:
            self.curriculum.scored(groups)

    def __len__(self) -> int:
        return len(self.dataset) if self.dataset is not None else 0

    def _next_prompts(self, count: int) -> list[Sample]:
        if self.dataset is None:
            return [Sample() for _ in range(count)]
        prompts: list[Sample] = []
        while len(prompts) < count:
            if self.sample_offset >= len(self.dataset):
                self.epoch_id += 1
                self.sample_offset = 0
                self._order_epoch()
            prompts.append(self.dataset[self.sample_offset])
            if self.curriculum is not None:
                prompts[-1].metadata[PROMPT_KEY] = self.dataset.order[self.sample_offset]
            self.sample_offset += 1
        return prompts

    def _order_epoch(self, saved: dict[str, Any] | None = None) -> None:
        if self.dataset is None:
            return
        if self.curriculum is not None:
            self.dataset.unshuffle()
        if self.args.rollout_shuffle:
            self.dataset.shuffle(self.epoch_id)
        if self.curriculum is not None and saved is not None:
            self.curriculum.load_state_dict(saved, self.epoch_id)
        elif self.curriculum is not None:
            self.curriculum.order_epoch(self.epoch_id)

    def _make_group(self, prompt: Sample) -> Group:
        group = [copy_sample(prompt) for _ in range(self.args.n_samples_per_prompt)]
        for index, sample in enumerate(group, self.sample_index):
            sample.group_index, sample.index = self.sample_group_index, index
        self.sample_index += len(group)
        self.sample_group_index += 1
        return list(group)

    def state_dict(self) -> dict[str, Any]:
        """Return the cursor in plain types; a checkpoint saves that of the trained batch."""
        return {
            "format": STATE_FORMAT,
            **{name: getattr(self, name) for name in _COUNTERS},
            "metadata": dict(self.metadata),
            "num_prompts": len(self),
            "prompts": self.dataset.digest if self.dataset is not None else None,
            "counts": dict(self.journal.counts),
            **({"curriculum": self.curriculum.state_dict()} if self.curriculum is not None else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A state without `format` (older runs) has no buffer."""
        if state.get("format", STATE_FORMAT) > STATE_FORMAT:
            found = f"data source state has format {state['format']}"
            raise ValueError(f"{found}; this version reads up to {STATE_FORMAT}.")
        if self.dataset is not None and (saved := state.get("num_prompts", len(self))) != len(self):
            now = f"--prompt-data has {len(self)} prompts now, the saved run had {saved}"
            logger.warning("%s: the order of the rest of this epoch differs from before the resume", now)
        elif self.dataset is not None and state.get("prompts", self.dataset.digest) != self.dataset.digest:
            logger.warning("--prompt-data has other prompts than when the checkpoint was saved.")
        for name in _COUNTERS:
            setattr(self, name, state[name])
        self.metadata = dict(state["metadata"])
        self.journal.restore(state.get("counts"))
        self._order_epoch(state.get("curriculum", {}))

    def save(self, rollout_id: int) -> None:
        """Do nothing: a checkpoint of the run holds `state_dict`."""

    def load(self, rollout_id: int | None = None) -> None:
        """Load the state that another release saved beside its checkpoints."""
        if not self.args.rollout_global_dataset or self.args.load is None or rollout_id is None:
            return
        path = Path(self.args.load) / "rollout" / f"global_dataset_state_dict_{rollout_id}.pt"
        if not path.exists():
            logger.info("There is no data source state at %s: prompts start from the first.", path)
            return
        self.load_state_dict(load_torch_file(path))


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Gives out returned groups first (in the order of --buffer-filter-path), then the dataset."""

    def __init__(self, args: PluginArgs):
        super().__init__(args)
        self.buffer: list[Group] = []
        self.num_held = 0  # at its front after a resume: what a pool of groups in flight held
        self.filter_path = args.buffer_filter_path or f"{__name__}.pop_first"
        self.buffer_filter = load_function(self.filter_path)

    def get_samples(self, num_samples: int) -> list[Group]:
        groups = self._take_from_buffer(num_samples)
        missing = num_samples - len(groups)
        return groups + super().get_samples(missing) if missing > 0 else groups

    def _take_from_buffer(self, num_samples: int) -> list[Group]:
        if not self.buffer or num_samples == 0:
            return []
        option, path = "--buffer-filter-path", self.filter_path
        with plugin_call(option, path, lambda: f"{num_samples} of {len(self.buffer)} groups"):
            groups = list(self.buffer_filter(self.args, None, self.buffer, num_samples))
        if len(groups) > num_samples:
            complaint = f"returned {len(groups)} groups; at most {num_samples} were asked for."
            wrong_return(option, path, complaint)
        if len({*map(id, groups), *map(id, self.buffer)}) < len(groups) + len(self.buffer):
            complaint = "returned a group twice or left it in the buffer, so that it would be trained again; "
            wrong_return(option, path, complaint + "take each group that it returns out of the buffer once.")
        self.journal.issued(groups, from_buffer=True)
        return groups

    def add_samples(self, samples: list[Group]) -> None:
        for group in samples:
            if not isinstance(group, list) or len(group) != self.args.n_samples_per_prompt:
                size = len(group) if isinstance(group, list) else type(group).__name__
                wanted = f"--n-samples-per-prompt {self.args.n_samples_per_prompt}"
                raise ValueError(f"add_samples takes groups of {wanted} entries; got {size}.")
        self.journal.returned(samples)
        self.buffer.extend(samples)

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def state_dict(self, held: Sequence[Group] = ()) -> dict[str, Any]:
        """Return the cursor with the buffer. `held`: groups that a rollout function keeps; they go first."""
        state = super().state_dict()
        if held:
            state["counts"]["returned"] = state["counts"].get("returned", 0) + len(held)
        buffer = [group_to_plain(group) for group in (*held, *self.buffer)]
        return {**state, "buffer": buffer, "num_held": len(held)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.buffer = [group_from_plain(group) for group in state.get("buffer", [])]
        self.num_held = state.get("num_held", 0)


def take_groups(data_source: Any, args: PluginArgs, num_groups: int) -> list[Group]:
    """Call `get_samples` of any data source; a mistake in a user's own is reported with its line."""
    if isinstance(data_source, RolloutDataSource) and type(data_source).__module__.startswith("slime."):
        return data_source.get_samples(num_groups)
    with plugin_call("--data-source-path", args.data_source_path, lambda: f"get_samples({num_groups})"):
        return check_groups(data_source.get_samples(num_groups))


def pop_first(args: PluginArgs, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the oldest groups of the buffer; this is the default buffer filter."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def build_dataset(args: PluginArgs) -> Dataset:
    """Read the training prompts that the flags describe."""
    if args.prompt_data is None:
        hint = f"name a {ENDINGS} file, or give --disable-rollout-global-dataset"
        raise ValueError(f"--prompt-data is not set: {hint}.")
    needs_tokenizer = args.apply_chat_template or args.rollout_max_prompt_len is not None
    return Dataset(
        args.prompt_data,
        load_tokenizer(args.hf_checkpoint) if needs_tokenizer else None,
        load_processor(args.hf_checkpoint) if args.multimodal_keys else None,
        args.rollout_max_prompt_len,
        seed=args.rollout_seed,
        fmt=training_format(args),
    )

"""Tests which causal language models of transformers train exactly on the FSDP trainer, and how.

Each family is built small and random from the defaults of its config, and one optimizer step of the FSDP
trainer over packed documents is compared with transformers, which gets one document at a time.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from slime.backends.fsdp import families
from slime.catalog.backends import BACKENDS
from slime.catalog.families import BY_STATE, PACKED, PADDED
from slime.cli.one_rank import alone
from slime.cli.verify_model import reference, shrink, trainer_job
from slime.cli.verify_model.compare import compare
from slime.cli.verify_model.layouts import CheckTarget

EXACT, DIFFERS, REFUSED, NO_REFERENCE = "exact", "DIFFERS", "refused", "not built"

# Number of layers, and settings that the default config lacks.
DEFAULTS: dict[str, tuple[int, dict[str, Any]]] = {
    "deepseek_v2": (2, {"num_experts_per_tok": 2}),
    "dots1": (2, {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    "gemma3n_text": (4, {}),
    "gemma4_text": (4, {"num_kv_shared_layers": 2}),
    "lfm2": (2, {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2}),
}


@dataclass(frozen=True, slots=True)
class SurveyRow:
    """The result for one family. `note`: why it is refused, or what differs first."""

    kind: str
    result: str
    how: str = "-"
    log_probs: float | None = None
    gradients: float | None = None
    note: str = ""

    def cells(self) -> list[str]:
        numbers = ["-" if error is None else f"{error:.0e}" for error in (self.log_probs, self.gradients)]
        megatron = "yes" if self.kind in (BACKENDS["megatron"].families or ()) else "-"
        return [self.kind, self.result, self.how, *numbers, megatron, self.note]


def all_kinds() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def chosen_kinds(words: Sequence[str]) -> list[str]:
    """Return the model types given to --families; `all` means every one."""
    known = all_kinds()
    unknown = [word for word in words if word != "all" and word not in known]
    if unknown:
        raise ValueError(f"--families {unknown[0]}: this transformers has no causal LM of that type.")
    return known if "all" in words else list(words)


def examine(kind: str, folder: Path) -> SurveyRow:
    """Train one small model of the family and compare it; errors are in the row."""
    from transformers import CONFIG_MAPPING

    how = "-"
    try:
        layers, changes = DEFAULTS.get(kind, (2, {}))
        config = shrink.shrink(_changed(CONFIG_MAPPING[kind](), changes), layers=layers)
        how = how_it_runs(config)
        shrink.build(config, folder / "model", "")
        expected = reference.compute(folder / "model", folder / "after", config.vocab_size)
    except families.NotTrainable as error:
        return SurveyRow(kind, REFUSED, how, note=_message(error))
    except Exception as error:  # models that are not text models fail in many ways
        note = f"no small text model of its default config ({_message(error)})"
        return SurveyRow(kind, NO_REFERENCE, note=note)
    target = CheckTarget("fsdp", "single", 1)
    job = trainer_job.TrainerJob(str(folder / "model"), target, str(folder), config.vocab_size)
    try:
        found = trainer_job.compute(0, job)
    except Exception as error:
        result = REFUSED if isinstance(error, ValueError) else DIFFERS
        return SurveyRow(kind, result, how, note=_message(error))
    verdict = compare(expected, found, tolerance=1e-4)
    result = EXACT if verdict.first is None else DIFFERS
    errors = verdict.errors["log-probs"], verdict.errors["gradients"]
    return SurveyRow(kind, result, how, *errors, note=verdict.first or "")


def _changed(config: Any, changes: dict[str, Any]) -> Any:
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    return config


def how_it_runs(config: Any) -> str:
    with torch.device("meta"):
        lm = families.build(config)
    if not families.runs_packed(lm):
        return PADDED
    return BY_STATE if families.stateful_modules(lm) else PACKED


def _message(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return (text if isinstance(error, ValueError) else f"{type(error).__name__}: {text}")[:160]


def survey(kinds: Sequence[str]) -> list[SurveyRow]:
    """Examine all given types; each row is printed as a line of a Markdown table when it is known.

    A family that becomes exact is added to `slime.catalog.families` too, which lets it train.
    """
    from transformers import __version__

    reference.be_quiet()
    torch.set_num_threads(1)
    print(f"transformers {__version__}, torch {torch.__version__.split('+')[0]}\n")
    print("| family | FSDP | how | log-probs | gradients | Megatron | note |\n|---|---|---|---|---|---|---|")
    rows = []
    with alone():
        for kind in kinds:
            with tempfile.TemporaryDirectory(prefix="slime-verify-") as folder:
                rows.append(examine(kind, Path(folder)))
            cells = " | ".join(cell.replace("|", "/") for cell in rows[-1].cells())
            print(f"| {cells} |", flush=True)
    return rows

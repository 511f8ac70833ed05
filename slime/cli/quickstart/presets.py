"""What an advantage estimator changes in the quick start's
recipe, which is that of GRPO. What the user writes wins over it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Preset:
    """Flags that differ from GRPO's: those the estimator
    cannot do without, and those tried on the tiny model alone.
    """

    needs: tuple[str, ...] = ()
    tiny: tuple[str, ...] = ()

    def flags(self, model: str) -> tuple[str, ...]:
        return self.needs + (self.tiny if model == "tiny" else ())


PRESETS = {
    "grpo": Preset(),
    "gspo": Preset(),
    "cispo": Preset(tiny=("--eps-clip", "1.0", "--eps-clip-high", "4.0")),
    "dr_grpo": Preset(),
    "rloo": Preset(),
    "reinforce_plus_plus": Preset(needs=("--normalize-advantages",)),
    "reinforce_plus_plus_baseline": Preset(needs=("--normalize-advantages",)),
    "ppo": Preset(tiny=("--critic-lr", "1e-3")),
}


def describe(estimator: str, model: str) -> str:
    """One line for the screen: `Preset of ppo: --critic-lr 1e-3`."""
    if estimator not in PRESETS:
        return f"Preset of {estimator}: none; the recipe is that of grpo."
    flags = " ".join(PRESETS[estimator].flags(model))
    return f"Preset of {estimator}: {flags or 'the recipe of grpo, unchanged'}."


def preset_flags(estimator: str, model: str) -> list[str]:
    """Flags for the RL run; none for an estimator that has no preset."""
    return list(PRESETS[estimator].flags(model)) if estimator in PRESETS else []

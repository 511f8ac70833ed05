"""Checks before the start of a run, in their order; `--skip-preflight` leaves some of them out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CheckRow:
    """One check. Example: the tokenizer is checked where the model's files were found to be there."""

    group: str
    subject: str  # of the errors that it raises
    check: str  # a function of the settings that yields findings
    needs: tuple[str, ...] = ()  # checks that must have found no error
    skip: str | None = None  # value of --skip-preflight that leaves it out


PLUGINS, MODEL_FILES, TOKENIZER, ROWS = "plug-in functions", "model files", "tokenizer", "prompt rows"

CHECKS = {
    PLUGINS: CheckRow("settings", "plug-ins", "slime.preflight.settings.check_plugin_functions"),
    "packages": CheckRow("packages", "packages", "slime.preflight.packages.check_packages"),
    MODEL_FILES: CheckRow("model", "--hf-checkpoint", "slime.preflight.models.check_model_files"),
    "weights": CheckRow("model", "--hf-checkpoint", "slime.preflight.models.check_weights", (MODEL_FILES,)),
    TOKENIZER: CheckRow("model", "--hf-checkpoint", "slime.preflight.models.check_tokenizer", (MODEL_FILES,)),
    "megatron folders": CheckRow(
        "model", "checkpoint", "slime.preflight.stored.check_megatron_folders", (MODEL_FILES,)
    ),
    "served model": CheckRow(
        "model", "--rollout-engine", "slime.preflight.stored.check_served", (MODEL_FILES,)
    ),
    "hub login": CheckRow("model", "--push-to-hub", "slime.preflight.stored.check_hub_login"),
    ROWS: CheckRow("data", "--prompt-data", "slime.preflight.prompts.check_rows"),
    "prompt lengths": CheckRow(
        "data", "--prompt-data", "slime.preflight.prompts.check_lengths", (TOKENIZER, ROWS), "lengths"
    ),
    # Not ROWS: without rows it checks less.
    "reward": CheckRow(
        "reward", "reward", "slime.preflight.reward.check_reward", (PLUGINS, TOKENIZER), "reward"
    ),
    "machine": CheckRow("machine", "machine", "slime.preflight.machine.check_machine", (), "machine"),
}

# Predicts the memory and the time of a step: returns the prediction, or None, and findings.
PREDICT = "slime.preflight.machine.predict"

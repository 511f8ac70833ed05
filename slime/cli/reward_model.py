"""`slime reward-model`: a reward model as a run with preset flags (slime/cli/tasks.py)."""

from slime.cli.tasks import TASKS

main = TASKS["reward-model"].main

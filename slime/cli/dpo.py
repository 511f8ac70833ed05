"""`slime dpo`: direct preference optimisation, as a run with preset flags (slime/cli/tasks.py)."""

from slime.cli.tasks import TASKS

main = TASKS["dpo"].main

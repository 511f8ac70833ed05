"""`slime sft`: supervised fine-tuning, as a run with preset flags (slime/cli/tasks.py)."""

from slime.cli.tasks import TASKS

main = TASKS["sft"].main

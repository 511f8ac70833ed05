"""`slime distill`: on-policy distillation from a teacher, as a run with preset flags (slime/cli/tasks.py)."""

from slime.cli.tasks import TASKS

main = TASKS["distill"].main

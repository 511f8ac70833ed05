"""What can be known to be wrong before any process starts: model, prompts, reward, packages, machine."""

from slime.preflight.report import Finding, Report
from slime.preflight.run import preflight

__all__ = ["Finding", "Report", "preflight"]

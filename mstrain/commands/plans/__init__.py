"""The modes of plan.py: which one the arguments ask for, its keys, and what it does."""

from mstrain.commands.plans.modes import help_lines, run

__all__ = ["help_lines", "run"]

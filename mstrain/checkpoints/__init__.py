"""Saving a run and restoring it on any mesh."""

from mstrain.checkpoints.checkpoints import Checkpoints

__all__ = ["Checkpoints"]

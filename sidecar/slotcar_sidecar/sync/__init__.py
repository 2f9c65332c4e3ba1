"""Follows a file of adapters that must be present, kept or absent: reads it, watches it, and does what it says."""

from slotcar_sidecar.sync.reconciler import Reconciler

__all__ = ["Reconciler"]

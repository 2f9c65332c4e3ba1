"""Checks and times slotcar on a machine with a GPU: tests/gpu/run.sh runs all of it, with nothing to install."""

"""Thousands of adapters on a few slots: engines on every plane, each row checked, hits and misses counted."""

"""What operators run beside slotcar: a real Prometheus that scrapes it under load, and promtool for metrics and rules.

They need Debian's package prometheus: `make apt`, then `make test-ops`.
"""

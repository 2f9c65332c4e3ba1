"""A soak: random client processes against a server that is killed, and a checker that recomputes every row offline.

plan (what is run) → director (kills and starts processes) → client (actors: engine, operator) → records → reader →
checker; aftermath, slope and outcome judge what is left. `python -m tests.soak` runs it.
"""

#!/usr/bin/env bash
# Checks and times slotcar on this machine's GPU, in under 8 minutes, with nothing to build or to install: Python 3.11 or
# newer with torch, triton, numpy and pytest is enough. What it finds lies in $OUT, or in docs/measurements without it:
# gpu.md and gpu.json, and beside them, or in build/gpu, a log of each part. Exit code 0: every part passed, or was
# skipped with a reason that is none of slotcar's; 1: one did not, and the others ran all the same.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/sidecar:$PWD/clients:$PWD/proto${PYTHONPATH:+:$PYTHONPATH}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${TMPDIR:-/tmp}/slotcar-triton}"
export PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
exec "${PYTHON:-python3}" -m tests.gpu --out "${OUT:-docs/measurements}" --logs "${OUT:-build/gpu}" "$@"

#!/usr/bin/env bash
# The sidecar of this machine: three slots for adapters of SmolLM2, for every engine that wants them. Ctrl-C ends it.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

exec "$PYTHON" -m slotcar_sidecar serve --listen "$SLOTCAR_TARGET" --base-model "$MODEL" --root "$ADAPTERS" \
    --slots 3 --max-rank 16

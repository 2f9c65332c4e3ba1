#!/usr/bin/env bash
# A sidecar and some engines, at ports from 8000 on: run.sh ENGINES [COMMAND …]
# They end with the command, or with Ctrl-C. What they log is in run/vllm.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
count=$1
shift

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
trap 'exit 0' INT TERM
examples/vllm/sidecar.sh >"$RUN/sidecar.log" 2>&1 &
for ((number = 0; number < count; number++)); do
    examples/vllm/engine.sh $((PORT + number)) >"$RUN/engine-$number.log" 2>&1 &
done
for ((number = 0; number < count; number++)); do
    until curl --silent --fail "http://127.0.0.1:$((PORT + number))/health"; do
        [ "$(jobs -pr | wc -l)" -gt "$count" ] || { echo "one of them ended: see $RUN" >&2; exit 1; }
        sleep 0.5
    done
done
echo "$count engines and their sidecar are ready"
if [ $# -gt 0 ]; then "$@"; else wait; fi

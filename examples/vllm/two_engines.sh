#!/usr/bin/env bash
# Two engines share one sidecar, its slots and its memory: run.sh 2 examples/vllm/two_engines.sh
set -euo pipefail
. "$(dirname "$0")/settings.sh"
other=$((PORT + 1))

echo '# Loaded once, through the first engine; the second has it without a load of its own.'
post "$PORT" /v1/load_lora_adapter "{\"lora_name\": \"shared\", \"lora_path\": \"$ADAPTERS/pirate\"}"
ask "$PORT" shared 'What is the capital of France?'
ask "$other" shared 'What is the capital of France?'

echo '# One adapter in one slot, and both engines are sessions that hold it.'
slotcar list
slotcar sessions

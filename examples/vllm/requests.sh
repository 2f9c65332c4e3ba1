#!/usr/bin/env bash
# What a client of one engine sees, and where its adapters come from: run.sh 1 examples/vllm/requests.sh
set -euo pipefail
. "$(dirname "$0")/settings.sh"

echo '# The base model does not ask the sidecar.'
ask "$PORT" smollm2 'What is the capital of France?'

echo '# A model that neither has is not found, as ever.'
ask "$PORT" pirate 'What is the capital of France?'

echo '# Somebody loads an adapter in the sidecar: it is a model of every engine, at once.'
slotcar load pirate "$ADAPTERS/pirate" --tier host
ask "$PORT" pirate 'What is the capital of France?'

echo "# vLLM's own route does the same; the path is as the sidecar sees it."
post "$PORT" /v1/load_lora_adapter "{\"lora_name\": \"capitals\", \"lora_path\": \"$ADAPTERS/capitals\"}"
ask "$PORT" capitals 'What is the capital of France?'

echo '# Base model and adapters, each with its version.'
curl --silent --show-error "http://127.0.0.1:$PORT/v1/models"
echo

echo '# Other bytes under a name that is there are a conflict, not a surprise.'
post "$PORT" /v1/load_lora_adapter "{\"lora_name\": \"capitals\", \"lora_path\": \"$ADAPTERS/numbered\"}"

echo '# An adapter that is taken away is not found by the next request.'
post "$PORT" /v1/unload_lora_adapter '{"lora_name": "capitals"}'
ask "$PORT" capitals 'What is the capital of France?'

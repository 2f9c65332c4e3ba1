#!/usr/bin/env bash
# One vLLM server whose adapters are the sidecar's: engine.sh [PORT [OPTION OF VLLM …]]. Ctrl-C ends it.
set -euo pipefail
. "$(dirname "$0")/settings.sh"

# SLOTCAR_TARGET is all that slotcar needs. The next line is vLLM's own switch for the routes that change adapters.
export VLLM_ALLOW_RUNTIME_LORA_UPDATING=True
# For a small machine: a gigabyte for keys and values, and threads that leave the cores to other engines too.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

exec "$PYTHON" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 --port "${1:-$PORT}" \
    --model "$MODEL" --served-model-name smollm2 --dtype float32 --max-model-len 1024 --max-num-seqs 16 \
    --enable-lora --max-loras 2 --max-lora-rank 16 "${@:2}"

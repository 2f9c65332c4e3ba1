# What the examples share; each variable may be set before. They run in the checkout's folder, after `make test-vllm`
# made .venv-vllm.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

PYTHON=${PYTHON:-.venv-vllm/bin/python}
RUN=${RUN:-$PWD/run/vllm}
PORT=${PORT:-8000}
ADAPTERS=${ADAPTERS:-$PWD/sidecar/slotcar_sidecar/demo/adapters}
# SmolLM2 as the demo converts it, which takes 20 seconds the first time.
MODEL=${MODEL:-$("$PYTHON" -c '
from pathlib import Path
from slotcar_sidecar.demo.model import smollm2_folder
print(smollm2_folder(Path.home() / ".cache" / "slotcar"))
')}

mkdir -p "$RUN"
export PYTHON RUN PORT ADAPTERS MODEL
export SLOTCAR_TARGET=${SLOTCAR_TARGET:-unix://$RUN/slotcar.sock}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1

slotcar() {
    "$PYTHON" -m slotcar_sidecar "$@"
}

# ask PORT MODEL QUESTION: the answer of one engine, as vLLM's server gives it.
ask() {
    curl --silent --show-error --max-time 120 "http://127.0.0.1:$1/v1/chat/completions" \
        --header 'Content-Type: application/json' \
        --data "{\"model\": \"$2\", \"messages\": [{\"role\": \"user\", \"content\": \"$3\"}],
                 \"temperature\": 0, \"max_tokens\": ${TOKENS:-16}, \"stream\": ${STREAM:-false}}"
    echo
}

# post PORT ROUTE JSON: one of the routes that change adapters.
post() {
    curl --silent --show-error --max-time 120 "http://127.0.0.1:$1$2" \
        --header 'Content-Type: application/json' --data "$3"
    echo
}

#!/usr/bin/env bash
# An adapter gets a new version while a request decodes with the old one: run.sh 1 examples/vllm/replace.sh
set -euo pipefail
. "$(dirname "$0")/settings.sh"

post "$PORT" /v1/load_lora_adapter "{\"lora_name\": \"style\", \"lora_path\": \"$ADAPTERS/capitals\"}"
echo '# What a whole answer is, with the first version.'
TOKENS=48 ask "$PORT" style 'Tell me about the sea.'

echo '# The same request again; when its first tokens are there, the name moves to other bytes.'
TOKENS=48 STREAM=true ask "$PORT" style 'Tell me about the sea.' >"$RUN/answer" &
until grep --quiet '"content":"[^"]' "$RUN/answer" 2>/dev/null; do
    kill -0 $! # else it ended without an answer
    sleep 0.01
done
post "$PORT" /v1/load_lora_adapter \
    "{\"lora_name\": \"style\", \"lora_path\": \"$ADAPTERS/pirate\", \"load_inplace\": true}"
wait
echo '# It went on with the version that it began with:'
"$PYTHON" -c '
import json, sys
chunks = [json.loads(line[6:]) for line in sys.stdin if line.startswith("data: {")]
print("".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks))
' <"$RUN/answer"

echo '# A new request has the new one.'
TOKENS=48 ask "$PORT" style 'Tell me about the sea.'
post "$PORT" /v1/unload_lora_adapter '{"lora_name": "style"}'

#!/usr/bin/env bash
# Create the environment if it does not exist, then serve on http://127.0.0.1:8080. Arguments are passed to `router`. If
# they name no models, the demo models are served with a memory limit at which every machine shows an eviction.
set -euo pipefail

DEMO_CPU_MIB=1000   # of main memory, as if the machine had no more
DEMO_MARGIN_MIB=128 # of it never given out. A forked worker is charged with 110 to 510 MiB, an executed one with 320 more

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${BOOTSTRAP_PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "run.sh: there is no $python; install Python 3.11 or newer, or name it: BOOTSTRAP_PYTHON=/path/to/python" >&2
    exit 1
fi
"$python" "$root/scripts/bootstrap.py" --extras worker

names_models() {
    local argument
    for argument in "$@"; do
        case $argument in --models-preset | --models-preset=* | --models-dir | --models-dir=*) return 0 ;; esac
    done
    [ -n "${ROUTER_MODELS_PRESET:-}${LLAMA_ARG_MODELS_PRESET:-}${ROUTER_MODELS_DIR:-}${LLAMA_ARG_MODELS_DIR:-}" ]
}

# Set as variables, so that options and variables of the user take precedence.
if ! names_models "$@"; then
    export ROUTER_DEVICE_LIMIT=${ROUTER_DEVICE_LIMIT-cpu=$DEMO_CPU_MIB}
    export ROUTER_MODELS_MEMORY_MARGIN=${ROUTER_MODELS_MEMORY_MARGIN-$DEMO_MARGIN_MIB}
fi
exec "$root/.venv/bin/router" "$@"

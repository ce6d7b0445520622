#!/usr/bin/env bash
# Create the environment if it does not exist, then serve on http://127.0.0.1:8080. Arguments are passed to `router`. If
# they name no models, the demo models are served (`router --demo`).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
python=${BOOTSTRAP_PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "run.sh: there is no $python; install Python 3.11 or newer, or name it: BOOTSTRAP_PYTHON=/path/to/python" >&2
    exit 1
fi
"$python" "$root/scripts/bootstrap.py" --extras worker
if [ "$(command -v router)" != "$root/.venv/bin/router" ]; then
    echo "run.sh: to use the command \`router\` in a shell: export PATH=\"$root/.venv/bin:\$PATH\"" >&2
fi
# A variable, because it gives way to models that arguments and other variables name.
ROUTER_DEMO=${ROUTER_DEMO-on} exec "$root/.venv/bin/router" "$@"

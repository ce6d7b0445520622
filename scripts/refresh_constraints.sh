#!/usr/bin/env bash
# Resolve all extras in an empty environment of Python 3.11, write config/constraints.txt, and run the suite with it.
# Run it monthly, and at once for a security fix. Edit TORCH by hand: it decides which builds and extras exist.
set -euo pipefail

TORCH=2.13.0
CPU_INDEX=https://download.pytorch.org/whl/cpu

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"${BOOTSTRAP_PYTHON:-python3.11}" -m venv "$work/venv"
python=$work/venv/bin/python
"$python" - "$root" "$work/wanted.txt" <<'PYTHON'
import sys
import tomllib
from pathlib import Path

if sys.version_info[:2] != (3, 11):
    sys.exit("refresh_constraints.sh: the pins are made with Python 3.11; name one: BOOTSTRAP_PYTHON=python3.11")
project = tomllib.loads(Path(sys.argv[1], "pyproject.toml").read_text("utf-8"))["project"]
wanted = [*project["dependencies"], *(need for extra in project["optional-dependencies"].values() for need in extra)]
own = project["name"] + "["  # an extra that is another's alias
Path(sys.argv[2]).write_text("".join(need + "\n" for need in wanted if not need.startswith(own)), "utf-8")
PYTHON

# The CPU build: no CUDA package is pinned for machines without a GPU.
echo "torch==$TORCH+cpu" >"$work/torch.txt"
"$python" -m pip install --quiet --dry-run --report "$work/report.json" --extra-index-url "$CPU_INDEX" \
    -c "$work/torch.txt" -r "$work/wanted.txt"

"$python" - "$work/report.json" "$root/config/constraints.txt" <<'PYTHON'
import json
import re
import sys
from datetime import datetime, timezone
from pathlib import Path

packages = [item["metadata"] for item in json.loads(Path(sys.argv[1]).read_text("utf-8"))["install"]]
pins = sorted((re.sub("[-_.]+", "-", p["name"]).lower(), p["version"].partition("+")[0]) for p in packages)
header = (
    f"# Tested versions, made by scripts/refresh_constraints.sh on {datetime.now(timezone.utc):%Y-%m-%d}. No local label at\n"
    "# torch: a CPU wheel satisfies the pin as well as a CUDA one. gptqmodel requires exactly this numpy.\n"
)
Path(sys.argv[2]).write_text(header + "".join(f"{name}=={version}\n" for name, version in pins), "utf-8")
print(f"{len(pins)} pins")
PYTHON

bash "$root/scripts/test.sh"

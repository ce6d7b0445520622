#!/usr/bin/env bash
# Create the environment with the test packages if it does not exist, check style, format and types, and run the tests.
# Arguments are passed to pytest (`-n 0`: one test after the other). `--venv DIR` is the folder of the environment.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
venv=$root/.venv
tests=()
while [ $# -gt 0 ]; do
    case $1 in
        --venv) venv=${2:?--venv needs a folder}; shift 2 ;;
        --venv=*) venv=${1#--venv=}; shift ;;
        *) tests+=("$1"); shift ;;
    esac
done

python=${BOOTSTRAP_PYTHON:-python3}
if ! command -v "$python" >/dev/null; then
    echo "test.sh: there is no $python; install Python 3.11 or newer, or name it: BOOTSTRAP_PYTHON=/path/to/python" >&2
    exit 1
fi
# Where it is set, each of the many processes of the tests would compile the modules again.
unset PYTHONDONTWRITEBYTECODE
# pip compiles all modules of all packages, which takes longer than the rest of the installation. The tests import a fifth
# of them, and Python compiles those.
PIP_COMPILE=0 "$python" "$root/scripts/bootstrap.py" --extras worker,dev --venv "$venv"
bin=$(cd -- "$venv/bin" && pwd)
cd "$root"

failed=()
step() {
    echo "== $*"
    "$bin/$@" || failed+=("$1")
}
# mypy needs one core and a minute. Meanwhile the tests are collected and begin: pytest rewrites their assertions, and
# Python compiles what they import, before each of the processes of the tests would do it.
step ruff check .
step ruff format --check .
echo "== mypy, beside the tests"
types=$(mktemp)
"$bin/mypy" >"$types" 2>&1 &
mypy=$!
"$bin/pytest" ${tests[@]+"${tests[@]}"} -n 0 --collect-only -q >/dev/null 2>&1 || true
export OMP_NUM_THREADS=1
# Three processes keep two cores busy, since many tests wait for other processes. A file runs in one of them;
# tests/conftest.py puts the longest files first.
step pytest -n 3 --dist loadfile --no-loadscope-reorder ${tests[@]+"${tests[@]}"}
wait "$mypy" || failed+=(mypy)
cat "$types" >&2
rm "$types"

if [ ${#failed[@]} -gt 0 ]; then
    echo "test.sh: failed: ${failed[*]}" >&2
    exit 1
fi

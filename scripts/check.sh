#!/usr/bin/env bash
# Makes a fresh environment and fails on lint, formatting, types or tests. CHECK_ENV keeps the environment in a folder of
# your own; without it a temporary one is used and removed.
set -euo pipefail
cd "$(dirname "$0")/.."

# Two busy cores make OpenMP threads spin; torch reads these when it is loaded.
export OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=0 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

if [ -z "${CHECK_ENV:-}" ]; then
    CHECK_ENV=$(mktemp -d)
    trap 'rm -rf "$CHECK_ENV"' EXIT
fi
[ -x "$CHECK_ENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$CHECK_ENV"
"$CHECK_ENV/bin/python" -m pip install --quiet --constraint constraints.txt --editable '.[test]'

"$CHECK_ENV/bin/ruff" check .
"$CHECK_ENV/bin/ruff" format --check .
"$CHECK_ENV/bin/mypy"
"$CHECK_ENV/bin/python" -m pytest -n "${CHECK_JOBS:-2}" --dist loadfile --ignore tests/tuning_db "$@"
"$CHECK_ENV/bin/python" -m pytest "$@" tests/tuning_db # one PostgreSQL, in one process

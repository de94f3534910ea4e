#!/usr/bin/env bash
# The trainer's CUDA path on one machine with a GPU and without network. See README.md beside this file.
#
#   deploy/gpu/check.sh [--rehearse] [--out FILE]
#
# WHEELS=DIR installs from a folder of wheels first; PYTHON chooses the interpreter (default: .venv/bin/python, else python3).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-.venv/bin/python}
[ -x "$PYTHON" ] || PYTHON=$(command -v python3)
if [ -n "${WHEELS:-}" ]; then
    "$PYTHON" -m pip install --quiet --no-index --find-links "$WHEELS" --editable '.[cpu]'
fi
command -v nvidia-smi >/dev/null && nvidia-smi --query-gpu=name,memory.total,driver_version --format=csv,noheader
PYTHONPATH=. exec "$PYTHON" -W ignore deploy/gpu/check.py "$@"

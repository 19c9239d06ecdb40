#!/usr/bin/env bash
# Runs every test.   scripts/test.sh [pytest options]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh dev,data,lm,eval,gcs,tpu
exec "${DCVIT_VENV:-.venv}/bin/python" -m pytest -n auto --dist worksteal "$@"

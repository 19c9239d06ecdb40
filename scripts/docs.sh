#!/usr/bin/env bash
# Builds the documentation into docs/_build/html, with warnings as errors.   scripts/docs.sh [sphinx-build options]
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh docs
JAX_PLATFORMS=cpu exec "${DCVIT_VENV:-.venv}/bin/python" -m sphinx --fail-on-warning --keep-going --quiet "$@" docs docs/_build/html

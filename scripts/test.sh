#!/usr/bin/env bash
# Runs the tests in parallel.   scripts/test.sh [--fast | --all] [pytest options]
#   --fast   skip tests marked slow or exhaustive: about a minute on two cores
#   --all    run every test, also those marked exhaustive, as CI does
# Without either, every test that is not marked exhaustive runs.
# DCVIT_EXTRAS are the extras to install. Tests that compare with PyTorch need "interop", which is several GB with CUDA.
set -euo pipefail
cd "$(dirname "$0")/.."
selection="not exhaustive"
case ${1:-} in
  --fast) selection="not slow and not exhaustive"; shift ;;
  --all) selection=""; shift ;;
esac
bash scripts/setup.sh "${DCVIT_EXTRAS:-dev,data,lm,eval,gcs,tpu}"
exec "${DCVIT_VENV:-.venv}/bin/python" -m pytest -n auto --dist loadfile -m "$selection" "$@"

#!/usr/bin/env bash
# Runs the tests in parallel.   scripts/test.sh [--exhaustive | --interop | --weekly | --all] [pytest options]
#   --exhaustive   only the tests marked slow or exhaustive: training runs, more combinations, and longer runs
#   --interop      only the tests marked interop and not exhaustive: they compare with PyTorch, ONNX and others, which are
#                  several GB with CUDA
#   --weekly       only the tests marked weekly, which take minutes, and those marked interop and exhaustive
#   --all          every test
# Without any, the tests without a mark run, which take a few minutes. DCVIT_EXTRAS are the extras to install.
set -euo pipefail
cd "$(dirname "$0")/.."
extras=${DCVIT_EXTRAS:-dev,data,tiff,lm,eval,gcs,s3,tpu}
selection="not slow and not exhaustive and not interop"
case ${1:-} in
  --exhaustive) selection="(slow or exhaustive) and not weekly and not interop"; shift ;;
  --interop) selection="interop and not exhaustive" extras=$extras,interop,wandb; shift ;;
  --weekly) selection="weekly or (interop and exhaustive)" extras=$extras,interop,launch,wandb; shift ;;
  --all) selection="" extras=$extras,interop,launch,wandb; shift ;;
esac
bash scripts/setup.sh "$extras"
status=0
"${DCVIT_VENV:-.venv}/bin/python" -m pytest -n auto --dist worksteal -m "$selection" "$@" || status=$?
# A process that ends inside pytest, as XLA's do at an unknown flag, takes the captured messages with it.
[ "$status" = 0 ] || echo "error: pytest ended with status $status; if no reason is above, run it with -s -n 0" >&2
exit "$status"

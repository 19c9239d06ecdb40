#!/usr/bin/env bash
# Trains models with DCMHA and plain models of the same shape, and compares them.
#   scripts/demo.sh    [--steps N] [--seeds 0,1,2] [--epochs N] [--out FOLDER]    generated tasks, and embedded images
#   scripts/demo.sh lm [--steps N] [--seeds 0,1,2] [--out FOLDER]                 embedded text
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" = lm ]; then
  echo "dcvit demo: DCFormer++ against Transformer++ on the text of Python's standard library"
else
  echo "dcvit demo: DCFormer against Transformer on in-context tasks, DCViT against ViT on 1,797 handwritten digits"
fi
bash "$root/scripts/setup.sh" train
exec "${DCVIT_VENV:-$root/.venv}/bin/python" -u "$root/scripts/demo.py" "$@"

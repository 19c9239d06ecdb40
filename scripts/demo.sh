#!/usr/bin/env bash
# Trains a model with DCMHA and a plain model of the same shape, and compares them.
#   scripts/demo.sh    [--epochs N] [--out FOLDER]                   DCViT and ViT on embedded images
#   scripts/demo.sh lm [--steps N] [--seeds 0,1,2] [--out FOLDER]    DCFormer++ and Transformer++ on embedded text
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
if [ "${1:-}" = lm ]; then
  echo "dcvit demo: DCFormer++ against Transformer++ on the text of Python's standard library"
else
  echo "dcvit demo: DCViT against a plain ViT on 1,797 handwritten digits"
fi
bash "$root/scripts/setup.sh"
exec "${DCVIT_VENV:-$root/.venv}/bin/python" -u "$root/scripts/demo.py" "$@"

#!/usr/bin/env bash
# Trains DCViT and a plain ViT of the same shape on embedded images and compares them.
#   scripts/demo.sh [--epochs N] [--out FOLDER]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
echo "dcvit demo: DCViT against a plain ViT on 1,797 handwritten digits"
bash "$root/scripts/setup.sh"
exec "${DCVIT_VENV:-$root/.venv}/bin/python" -u "$root/scripts/demo.py" "$@"

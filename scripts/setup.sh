#!/usr/bin/env bash
# Creates the virtual environment (.venv, or $DCVIT_VENV) and installs the package there. Does nothing until pyproject.toml
# or constraints.txt changes.   scripts/setup.sh [extra,extra]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${DCVIT_VENV:-.venv}
python=${PYTHON:-python3}
package=.${1:+[$1]}
stamp=$venv/.installed-$(echo "$package" | cat - pyproject.toml constraints.txt | sha256sum | cut -c1-16)

if [ ! -x "$venv/bin/python" ]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "error: $python is older than Python 3.11; set PYTHON to a newer one" >&2
    exit 2
  }
  echo "creating the virtual environment $venv"
  "$python" -m venv "$venv"
fi
if [ ! -e "$stamp" ]; then
  echo "installing $package into $venv (takes minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable "$package"
  touch "$stamp"
fi

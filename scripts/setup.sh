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
  versions=(--constraint constraints.txt)
  if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 14))'; then
    versions=()
    echo "$("$venv/bin/python" --version) is newer than the versions in constraints.txt (for Python 3.11 to 3.13):" \
      "installing the newest releases, which are not tested together; set PYTHON to an older one for the tested ones" >&2
  fi
  echo "installing $package into $venv (takes minutes the first time)"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "${versions[@]}" --editable "$package"
  touch "$stamp"
fi

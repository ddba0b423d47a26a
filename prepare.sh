#!/usr/bin/env bash
# Installs accbench and makes mock data. Safe to repeat, and quick when nothing changed.
#
#   bash prepare.sh [--extras xla,dev] [--no-data] [-- FLAGS OF `accbench data mock`]
#
# Installs into the environment that is active (venv or conda), else into .venv, for which uv
# finds or brings a Python where none that fits is on the path.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "prepare.sh: $*" >&2; exit 2; }

extras=
[[ $(uname -sm) == "Linux x86_64" ]] && extras=xla # torch_xla has wheels for nothing else
data=yes
while (($#)); do
  case $1 in
    --extras) (($# > 1)) || fail "--extras needs a list, such as xla,dev"; extras=$2; shift 2 ;;
    --no-data) data=; shift ;;
    --) shift; break ;;
    *) fail "unknown flag $1; there are: --extras LIST, --no-data, -- (then flags for the mock data)" ;;
  esac
done

newest=14 without=
if [[ ,$extras, == *,xla* ]]; then # torch_xla has wheels for no newer Python
  newest=13 without="; with --extras '', which leaves torch_xla out, up to 3.14"
fi
right_version() { "$1" -c "import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; }

if [[ -n ${VIRTUAL_ENV:-} ]]; then
  env=$VIRTUAL_ENV
elif [[ -n ${CONDA_PREFIX:-} ]]; then
  env=$CONDA_PREFIX
else
  env=$PWD/.venv
  # A set-up that was interrupted leaves a folder without pip; so does uv, and then a stamp.
  if ! "$env/bin/python" -m pip --version >/dev/null 2>&1 && ! compgen -G "$env/.accbench-*" >/dev/null; then
    for python in python3 python3.{13..10} python3.14; do
      right_version "$python" && break || python=
    done
    if [[ -n $python ]]; then
      "$python" -m venv --clear "$env" || fail "cannot make .venv with $python; on Debian: apt install python3-venv"
    elif command -v uv >/dev/null; then
      uv venv --quiet --clear --python ">=3.10,<3.$((newest + 1))" "$env" || fail "uv has no Python 3.10 to 3.$newest; install one, or activate an environment that has it"
    else
      fail "no Python 3.10 to 3.$newest found; install one, or uv, which brings one, or activate an environment that has it"
    fi
  fi
fi
python=$env/bin/python
right_version "$python" || fail "$env has $("$python" --version 2>&1 || true); accbench needs Python 3.10 to 3.$newest$without"

# What was installed last time, and from what.
stamp=$env/.accbench-${extras//[^a-z0-9]/-}
now=$(cat setup.py pyproject.toml accbench/__init__.py | cksum)-$PWD
if [[ ! -f $stamp || $(<"$stamp") != "$now" ]]; then
  uv=$(command -v uv || true)
  if [[ -z $uv ]]; then
    "$python" -m pip install --quiet --disable-pip-version-check uv
    uv=$env/bin/uv
  fi
  what=.${extras:+[$extras]}
  echo "installing accbench${extras:+[$extras]} into $env"
  # Compiled here, for where Python may not write (PYTHONDONTWRITEBYTECODE, as in many
  # containers) every worker would compile all it imports, at each start.
  "$uv" pip install --quiet --compile-bytecode --python "$python" --editable "$what"
  echo "$now" >"$stamp"
fi

if [[ -n $data ]]; then
  "$python" -m accbench data mock "$@"
fi

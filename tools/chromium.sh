#!/usr/bin/env bash
# Makes Debian's Chromium and its driver available to the browser tests; where it cannot, it only
# says what is missing, and those tests are skipped.
set -euo pipefail
source "$(dirname "$0")/retry.sh"
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then exit 0; fi
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "observability: Debian's packages chromium and chromium-driver are missing: the playground's tests will be skipped" >&2
  exit 0
fi
printf '\033[1m[setup]\033[0m installing Debian packages: chromium chromium-driver\n'
if ! apt_install chromium chromium-driver; then
  echo "observability: Debian's packages chromium and chromium-driver cannot be installed (apt-get says why above): the playground's tests will be skipped" >&2
fi

# Sourced by scripts that ask others for something: a package index, a mirror of Debian or whoever
# holds dpkg's lock may refuse for a moment, which must not end a run.

# Who interrupts means the whole, also where the command catches it and fails, as pip does.
trap 'exit 130' INT

# Run a command up to three times, until it succeeds.
thrice() {
  local pause
  for pause in 5 20; do
    if "$@"; then return; fi
    echo "failed, tried again in $pause s: $*" >&2
    sleep "$pause"
  done
  "$@"
}

# Install Debian packages, as root.
apt_install() { thrice _apt_install "$@"; }

# One try. An index that cannot be had is a warning to apt, so each try asks for all of them again.
_apt_install() {
  local options=(-qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300)
  apt-get "${options[@]}" update \
    && DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" install -y --no-install-recommends "$@" >/dev/null
}

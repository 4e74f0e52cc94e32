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
_apt_install() { _apt_get update && _apt_get install -y --no-install-recommends "$@"; }

# apt-get, quiet. It waits for dpkg's lock if it is told to, for those of its lists and archives never:
# somebody else's update, as of a second set-up, is waited for here.
_apt_get() {
  local options=(-qq -o Acquire::Retries=3 -o DPkg::Lock::Timeout=300) said="" waited
  for ((waited = 0; ; waited++)); do
    if said=$(LC_ALL=C DEBIAN_FRONTEND=noninteractive apt-get "${options[@]}" "$@" 2>&1 >/dev/null); then
      break
    elif [[ $said != *"Could not get lock"* ]] || ((waited >= 300)); then
      echo "$said" >&2
      return 1
    fi
    ((waited)) || echo "waiting for another process: $said" >&2
    sleep 1
  done
  [[ -z $said ]] || echo "$said" >&2
}

#!/usr/bin/env bash
# What CMake has run nvcc: what it says of a source is kept beside the object, for as long as that
# is. A source that is not compiled again would say nothing again.
set -o pipefail
for ((at = 1; at < $#; ++at)); do
  [[ "${!at}" == -o ]] && next=$((at + 1)) && object="${!next}"
done
"$@" 2>&1 | tee "${object%.cu.o}.log"

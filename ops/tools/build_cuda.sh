#!/usr/bin/env bash
# Compile the CUDA sources for sm_90a on a machine that needs neither a GPU nor a CUDA toolkit, and
# check the machine code: the copy engine and whole records in the scan, tensor cores in Hopper's
# matmul and attention, whose products wait for none but those that they need, no spills.
#
# With --library, build instead the whole library for sm_90a, as $BUILD_DIR/site: a folder for the
# front of PYTHONPATH, where Python finds it before one that is installed.
# With --fat, build instead the whole library for every architecture in cmake/cuda.cmake (sm_80 to
# sm_100, and PTX), as a wheel in $BUILD_DIR. NVCC names another compiler; otherwise the pinned one
# comes from constraints-cuda.txt.
set -euo pipefail

ops="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
build="${BUILD_DIR:-$ops/build/cuda}"
toolkit="$build/toolkit"
python="${PYTHON:-$(command -v "$ops/../.venv/bin/python" || command -v python3)}"
mkdir -p "$build"
source "$ops/../tools/retry.sh"

if [[ -z "${NVCC:-}" ]]; then
  if ! cmp -s "$ops/constraints-cuda.txt" "$toolkit/constraints-cuda.txt"; then
    rm -rf "$toolkit" "$build/library"
    thrice "$python" -m pip install --quiet --disable-pip-version-check --no-deps --target "$toolkit" \
      -r "$ops/constraints-cuda.txt"
    cp "$ops/constraints-cuda.txt" "$toolkit/"
  fi
  cuda="$toolkit/nvidia/cu13"
  NVCC="$cuda/bin/nvcc"
  cuobjdump="$cuda/bin/cuobjdump"
else
  cuobjdump="$(dirname "$NVCC")/cuobjdump"
fi

library="$build/library"
objects=CMakeFiles/baton_ops.dir/csrc/cuda

# Builds the library for sm_90a, or of it what is named, as far as it is not there by this compiler:
# CMake keeps to the one that it found first, and Ninja to what another version of it has made.
build_library() {
  local flags="-L$(dirname "$NVCC")/../lib -Xptxas -v -Xcompiler -Wall,-Wextra" compiler
  compiler="$NVCC, $("$NVCC" --version)"
  if [[ "$compiler" != "$(cat "$library/compiler" 2>/dev/null)" ]]; then
    rm -rf "$library"
    mkdir -p "$library"
    echo "$compiler" >"$library/compiler"
  fi
  export PATH="$(dirname "$python"):$PATH" CUDACXX="$NVCC"
  cmake -S "$ops" -B "$library" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBATON_OPS_CUDA=ON \
    -DBATON_OPS_CUDA_ARCHITECTURES=90a-real -DPython_EXECUTABLE="$python" \
    -DCMAKE_CUDA_FLAGS="$flags" -DCMAKE_CUDA_COMPILER_LAUNCHER="$ops/tools/keep_log.sh" >"$build/library.log"
  cmake --build "$library" "$@" >>"$build/library.log" || { tail -n 40 "$build/library.log" >&2; exit 1; }
}

if [[ "${1:-}" == --library ]]; then
  build_library
  "$python" "$ops/../tools/gpu.py" lay-out --library "$library/libbaton_ops.so" --site "$build/site"
  exit
fi

if [[ "${1:-}" == --fat ]]; then
  PATH="$(dirname "$python"):$PATH" CUDACXX="$NVCC" CUDAFLAGS="-L$(dirname "$NVCC")/../lib" \
    "$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
    -C cmake.define.BATON_OPS_CUDA=ON -w "$build" "$ops"
  ls "$build"/*.whl
  exit
fi

# The library's own objects, so that its code is what is checked here, and compiled once.
cd "$ops/csrc/cuda"
sources=(*.cu)
cd "$OLDPWD"
build_library --target $(printf -- "$objects/%s.o " "${sources[@]}")
logs=()
for name in "${sources[@]%.cu}"; do
  log="$library/$objects/$name.log"
  if ! grep -q 'ptxas info' "$log"; then
    echo "$name.cu: ptxas has said nothing of it, see $log" >&2
    exit 1
  fi
  logs+=("$log")
done
grep -hE 'warning' "${logs[@]}" || true

if grep -hE '[1-9][0-9]* bytes spill' "${logs[@]}"; then
  echo "a kernel spills registers to local memory" >&2
  exit 1
fi

# ptxas says so in a remark, and goes on. By its text: its numbers, C7510 and some behind it, are
# also those of waits that it adds where some registers need one, which cost little.
if grep -HE 'wgmma\.mma_async instructions are serialized' "${logs[@]}" >&2; then
  echo "ptxas has products of the functions above wait for each other: up to 20 times slower" >&2
  exit 1
fi

# Whether a source's machine code has all that it should have, and no local memory.
check_code() {
  local name="$1" wanted
  PATH="$(dirname "$cuobjdump"):$PATH" "$cuobjdump" --dump-sass "$library/$objects/$name.cu.o" >"$build/$name.sass"
  for wanted in "${@:2}"; do
    if ! grep -qE "$wanted" "$build/$name.sass"; then
      echo "$name.cu: no $wanted in its machine code" >&2
      return 1
    fi
  done
  if grep -m 3 -E '\b(LDL|STL)\b' "$build/$name.sass"; then
    echo "$name.cu uses local memory" >&2
    return 1
  fi
}

if [[ -x "$cuobjdump" ]]; then
  # Hopper's kernels: the tensor cores, the copy engine, an early start that waits, wide stores.
  hopper=(HGMMA UTMALDG ACQBULK PREEXIT 'STG\.E\.128 ')
  check_code logprobs 'LDS\.128' UBLKCP 'STG\.E\.128\.STRONG' REDUX
  check_code matmul_few "${hopper[@]}"
  check_code matmul_grouped "${hopper[@]}"
  check_code matmul_many "${hopper[@]}" 'UTMALDG\.4D' MOVM USETMAXREG
  check_code decode_attention "${hopper[@]}"
  check_code latent_attention 'HMMA\.16816\.F32\.BF16' 'LDSM\.16\.M8' 'LDSM\.16\.MT' LDGSTS ACQBULK PREEXIT
  check_code latent 'HMMA\.16816\.F32\.BF16' 'LDSM\.16\.M8' 'LDSM\.16\.MT' LDGSTS ACQBULK PREEXIT 'STG\.E\.128 '
  check_code latent_hopper "${hopper[@]}" USETMAXREG
  check_code scaled_turned 'QGMMA\.64x128x32' 'UTMALDG\.2D' 'UTMALDG\.5D' LDGSTS ACQBULK PREEXIT 'STG\.E\.128 ' MOVM USETMAXREG
  check_code scaled_row 'QGMMA\.64x8x32' LDGSTS ACQBULK PREEXIT
  check_code scaled ACQBULK PREEXIT HMMA 'LDG\.E\.128' 'F2FP\.F16\.E4M3'
  check_code prompt_attention "${hopper[@]}" USETMAXREG
  # Ranks meet at system scope, and read what others write meanwhile: nothing of it is constant.
  check_code rank_sum ACQBULK PREEXIT 'STG\.E\.64\.STRONG\.SYS' 'LDG\.E\.64\.STRONG\.SYS' 'MEMBAR\.[A-Z.]*SYS' 'LDG\.E\.STRONG\.SYS' 'LDG\.E\.128 ' 'STG\.E\.128 '
  if grep -m 3 -E 'LDG\.[A-Z0-9.]*CONSTANT' "$build/rank_sum.sass"; then
    echo "rank_sum.cu reads parts as if they were constant" >&2
    exit 1
  fi
fi
echo "CUDA sources compile for sm_90a"

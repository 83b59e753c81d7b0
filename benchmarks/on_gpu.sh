#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Everything that only a machine with an NVIDIA GPU can say, in about eight minutes: builds for this
# card, runs the GPU tests, compute-sanitizer on small calls, compares the PTX emulator's results
# with the card's, measures. Needs Python with torch (a CUDA build), pybind11, ninja, pytest; nvcc.
# Nothing is installed, and no setting of the card is touched.
#
#   benchmarks/on_gpu.sh              on such a machine
#   benchmarks/on_gpu.sh --dry-run    a rehearsal without a GPU: every step on the CPU or the
#                                     emulator, with the extension of the checkout
#
#   OUT=folder          where JSON files and the log go (default: benchmarks/results/<gpu>)
#   PYTHON=python3      the Python with torch
#   STEPS="build tests measure sanitizer emulator"    a choice of them
#   SECONDS_IN_ALL=480  no step runs longer than what is left of these
#
# A step that fails or runs out of its time does not stop the others; steps.json says how each ended.
set -uo pipefail
cd "$(dirname "$0")/.."

python=$(command -v "${PYTHON:-python3}") || {
  echo "on_gpu.sh: no ${PYTHON:-python3} found; PYTHON=... names the Python with torch" >&2
  exit 2
}
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
device=cuda
for argument in "$@"; do
  case $argument in
    --dry-run) device=cpu ;;
    *)
      echo "on_gpu.sh: $argument is not known; supported: --dry-run" >&2
      exit 2
      ;;
  esac
done
export PYTHONUNBUFFERED=1 DELTANET_TEST_DEVICE=$device
scratch=$PWD/build/gpu
mkdir -p "$scratch"

if [ "$device" = cuda ]; then
  capability=$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())') || {
    echo "on_gpu.sh: torch finds no GPU (--dry-run rehearses without one)" >&2
    exit 1
  }
  gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name())')
  out=${OUT:-benchmarks/results/$(tr 'A-Z ' 'a-z-' <<< "$gpu")}
  export PYTHONPATH=$scratch/lib
else
  capability=none gpu="none, a rehearsal"
  out=${OUT:-$scratch/dry-run}
  export PYTHONPATH=$PWD
fi
mkdir -p "$out"
out=$(cd "$out" && pwd)
log=$out/log.txt
: > "$log"
say() { echo "==> $*" | tee -a "$log"; }
say "on $gpu, compute capability $capability; results in $out"

names=() codes=() times=()
# step NAME SECONDS COMMAND...: at most so long, output shown and kept.
step() {
  local name=$1 limit=$2 start=$SECONDS left=$((${SECONDS_IN_ALL:-480} - SECONDS)) code
  shift 2
  [[ " ${STEPS:-$name} " == *" $name "* ]] || return 0
  [ "$limit" -le "$left" ] || limit=$left
  if [ "$limit" -lt 10 ]; then
    say "$name: left out, there is no time"
    names+=("$name") codes+=(125) times+=(0)
    return 125
  fi
  say "$name (at most $limit s)"
  timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$log" | tail -n 60
  code=${PIPESTATUS[0]}
  names+=("$name") codes+=("$code") times+=($((SECONDS - start)))
  case $code in
    0) say "$name: passed in ${times[-1]} s" ;;
    124 | 137) say "$name: stopped after ${times[-1]} s" ;;
    *) say "$name: FAILED with status $code after ${times[-1]} s" ;;
  esac
  return "$code"
}

build() {
  if [ "$device" = cpu ]; then
    "$python" -c 'import deltanet_ext; print(deltanet_ext.build_info())'
    return
  fi
  DELTANET_CUDA=on TORCH_CUDA_ARCH_LIST=$capability scripts/build_extension.sh "$python" \
    build --build-base build/gpu --build-lib "$scratch/lib" --build-temp "$scratch/objects" &&
    "$python" benchmarks/gpu.py facts --out "$out/facts.json"
}

# The CPU is idle while the GPU works: the emulator's results are made meanwhile, from the same
# sources on the same machine. exec: who ends this ends the program, not a shell around it.
emulate() {
  "$python" tests/ptx_emulator/build.py --library > "$scratch/emulator.log" 2>&1 || return
  export PTX_EMULATOR_CHECKS=none
  exec nice "$python" benchmarks/gpu.py outputs --device emulated --out "$scratch/emulated.pt" \
    >> "$scratch/emulator.log" 2>&1
}

tests() {
  local how=()
  if [ "$device" = cpu ]; then
    how=(-k "packed100 or weak or decode or transition or inverse or (invariance and 70)")
  elif "$python" -c 'import xdist' 2> /dev/null; then
    how=(-n 8) # the references are slow Python on the CPU; GPU calls are short
  fi
  cd tests && "$python" -m pytest -q -rs -m gpu "${how[@]}" test_gpu.py \
    --junit-xml="$out/tests.xml" -p no:cacheprovider
}

sanitizer() {
  local tool failed=0
  PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin # where toolkits have it
  for tool in memcheck racecheck synccheck; do
    echo "--- $tool"
    if [ "$device" = cuda ]; then
      # Without torch's cache of memory: else one tensor's end is another's beginning.
      PYTORCH_NO_CUDA_MEMORY_CACHING=1 timeout 60 compute-sanitizer --tool "$tool" \
        --error-exitcode 9 "$python" benchmarks/gpu.py small --device cuda || failed=1
    else
      "$python" benchmarks/gpu.py small --device cpu || failed=1
    fi
  done
  return "$failed"
}

emulator() {
  "$python" benchmarks/gpu.py outputs --device "$device" --out "$scratch/card.pt" || return
  if [ -n "${emulating:-}" ]; then wait_for "$emulating" 90; fi
  [ -f "$scratch/emulated.pt" ] || {
    echo "the emulator gave no results:"
    tail -n 5 "$scratch/emulator.log"
    return 1
  }
  "$python" benchmarks/gpu.py compare "$scratch/card.pt" "$scratch/emulated.pt" \
    --out "$out/emulator.json"
}

# A process of ours, for at most so many seconds.
wait_for() {
  local deadline=$((SECONDS + $2))
  while kill -0 "$1" 2> /dev/null && [ "$SECONDS" -lt "$deadline" ]; do sleep 1; done
}

measure() {
  "$python" benchmarks/gpu.py measure --device "$device" --seconds 80 --out "$out/measured.json"
}

export -f build tests sanitizer emulator measure wait_for
export python device scratch out capability

failed=0 emulating=
step build 150 bash -c build || failed=1
if [ "$device" = cuda ] && [ ! -f "$scratch"/lib/deltanet_ext/_C_cuda*.so ]; then
  say "nothing was built: the end"
  exit 1
fi
if [[ " ${STEPS:-emulator} " == *" emulator "* ]]; then
  rm -f "$scratch/emulated.pt"
  emulate &
  export emulating=$!
fi
step tests 150 bash -c tests || failed=1
step measure 100 bash -c measure || failed=1
step sanitizer 120 bash -c sanitizer || failed=1
step emulator 120 bash -c emulator || failed=1
if [ -n "$emulating" ]; then kill "$emulating" 2> /dev/null; fi

{
  echo "{\"gpu\": \"$gpu\", \"seconds\": $SECONDS, \"steps\": ["
  for i in "${!names[@]}"; do
    [ "$i" = 0 ] || echo ","
    printf ' {"name": "%s", "status": %s, "seconds": %s}' "${names[i]}" "${codes[i]}" "${times[i]}"
  done
  echo "]}"
} > "$out/steps.json"
say "$SECONDS s in all"
for i in "${!names[@]}"; do say "  ${names[i]}: status ${codes[i]}, ${times[i]} s"; done
exit "$failed"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the C++ tests of one preset of CMakePresets.json and runs them with CTest.
#
#   run_cpp_tests.sh dev|asan|cuda [CTEST-ARGUMENT...]
#
# When GoogleTest (cuda: nvcc) cannot be had, it says so and leaves build/cpp-PRESET/not-built.txt.
set -euo pipefail

preset=$1
shift
folder=build/cpp-$preset
mkdir -p build
echo "==> C++ tests ($preset)"
cmake --preset "$preset" > "$folder.log" 2>&1 || {
  cat "$folder.log"
  exit 1
}
[ "$preset" = cuda ] && [ -f "$folder/not-built.txt" ] || cmake --build --preset "$preset"
if [ "$preset" = dev ]; then
  ln -sf "$folder/compile_commands.json" compile_commands.json
fi
if [ -f "$folder/not-built.txt" ]; then
  echo "==> C++ tests not run: $(cat "$folder/not-built.txt")"
  exit 0
fi
ctest --preset "$preset" "$@"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Cross-compiles the C++ tests for arm64 and runs them under qemu's emulation of one program. Minutes, not hours.
#
#   run_neon_tests.sh [CTEST-ARGUMENT...]
set -euo pipefail

for tool in aarch64-linux-gnu-g++ qemu-aarch64 /usr/src/googletest/CMakeLists.txt; do
  [ -e "$tool" ] || command -v "$tool" > /dev/null || {
    scripts/install_debian_packages.sh g++-aarch64-linux-gnu qemu-user googletest
    break
  }
done
scripts/run_cpp_tests.sh neon "$@"

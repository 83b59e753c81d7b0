#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The C++ tests, then pytest, both even if the first fail; at the end a line for everything that could
# not be installed, and so was not tested.
#
#   run_tests.sh PYTHON STAMPS [PYTEST-ARGUMENT...]
set -uo pipefail

python=$1 stamps=$2
shift 2
failed=0
scripts/run_cpp_tests.sh dev || failed=1
[ "$failed" = 0 ] || echo "==> the C++ tests failed"

echo "==> pytest"
"$python" -m pytest -rs "$@" || failed=1

cat "$stamps"/*.missing 2> /dev/null
[ ! -f build/cpp-dev/not-built.txt ] || echo "C++ tests not run: $(cat build/cpp-dev/not-built.txt)"
exit "$failed"

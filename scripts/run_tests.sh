#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# The C++ tests, then pytest, both even if the first fail; at the end a line for everything that was not
# tested, and why: what could not be installed, and what C++ tests were skipped.
#
#   run_tests.sh PYTHON STAMPS [PYTEST-ARGUMENT...]
set -uo pipefail

python=$1 stamps=$2
shift 2
failed=0
scripts/run_cpp_tests.sh dev || failed=1
[ "$failed" = 0 ] || echo "==> the C++ tests failed"

# Four processes hold about 1 GB each; more of them wait for each other's cores and caches. `worksteal`
# keeps the tests of one file together, so that what they share is made once per process.
parallel=(-n auto --maxprocesses 4 --dist worksteal)
"$python" -c "import xdist" 2> /dev/null || parallel=()

echo "==> pytest"
"$python" -m pytest -rs "${parallel[@]}" "$@" || failed=1

cat "$stamps"/*.missing 2> /dev/null
if [ -f build/cpp-dev/not-built.txt ]; then
  echo "C++ tests not run: $(cat build/cpp-dev/not-built.txt)"
else
  # GoogleTest prints the reason in the line after "FILE:LINE: Skipped".
  sed -n '/: Skipped$/ { n; p }' build/cpp-dev/Testing/Temporary/LastTest.log 2> /dev/null |
    sort | uniq -c | sed 's/^ *\([0-9]*\) /C++ tests skipped: \1: /'
fi
exit "$failed"

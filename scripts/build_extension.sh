#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Builds the extension in place, with one short line per compiled file instead of its whole command.
#
#   build_extension.sh PYTHON [SETUP-ARGUMENT...]        default: build_ext --inplace
set -euo pipefail

python=$1
shift
[ $# -gt 0 ] || set -- build_ext --inplace
scripts/with_python_headers.sh "$python" "$python" setup.py --quiet "$@" 2>&1 |
  awk '
    # "[3/8] ccache c++ ... -c -c FILE -o OBJECT ..."
    /^\[[0-9]+\/[0-9]+\] .* -c / {
      step = $1
      sub(/.* -c /, ""); sub(/ -o .*/, "")
      sub(ENVIRON["PWD"] "/", "")
      print step, $0; fflush(); next
    }
    { print; fflush() }'

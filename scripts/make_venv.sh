#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes a virtual environment, unless it is there.
#
#   make_venv.sh PYTHON FOLDER
set -euo pipefail

python=$1 folder=$2
fail() {
  echo "deltanet_ext: $*" >&2
  exit 1
}

[ -x "$folder/bin/python" ] && exit 0
command -v "$python" > /dev/null || fail "no $python found; PYTHON=... names another (3.10 or newer)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
  fail "$python is Python $version; supported: 3.10 and newer (PYTHON=... names another)"
echo "==> making a virtual environment in $folder (Python $version)"
"$python" -m venv "$folder" || {
  rm -rf "$folder"
  fail "$python cannot make a virtual environment; on Debian and Ubuntu: apt-get install python3-venv"
}

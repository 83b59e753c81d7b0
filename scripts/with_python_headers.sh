#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs a command so that the compiler finds Python.h. Where Python came without its headers (Debian
# has them in a package of their own), they are unpacked into the build folder.
#
#   with_python_headers.sh PYTHON COMMAND...
set -euo pipefail

python=$1
shift
folder=build/python-headers
include=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
name=$(basename "$include") # python3.11
if [ ! -f "$include/Python.h" ]; then
  if [ ! -f "$folder/usr/include/$name/Python.h" ]; then
    echo "==> Python.h is not installed: fetching Debian's lib$name-dev"
    "$(dirname "$0")/fetch_debian_packages.sh" "$folder" "lib$name-dev" || {
      echo "deltanet_ext: no Python.h in $include; on Debian and Ubuntu: apt-get install python3-dev" >&2
      exit 1
    }
  fi
  export CPATH="$PWD/$folder/usr/include/$name:$PWD/$folder/usr/include${CPATH:+:$CPATH}"
fi
exec "$@"

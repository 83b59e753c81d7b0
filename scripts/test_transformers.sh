#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the tests of the switch with several versions of transformers, and with the packages that
# compete for the same functions. Each has an environment of its own that sees the checkout's torch.
#
#   test_transformers.sh PYTHON FOLDER [PYTEST-ARGUMENT...]
#
#   TRANSFORMERS_VERSIONS="5.24.0"    which ones; "kernels" and "fla" are those packages
set -euo pipefail

python=$1 folder=$2
shift 2
export PIP_DISABLE_PIP_VERSION_CHECK=1
packages_of() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

# 0, or what could not be installed
prepare() {
  local here=$1 packages=$2 alone=$3
  [ ! -f "$here/ready" ] || return 0
  "$python" -m venv "$here"
  # What the checkout's environment has is found after what this one has.
  packages_of "$python" > "$(packages_of "$here/bin/python")/zz_checkout.pth"
  # shellcheck disable=SC2086  lists of packages
  "$here/bin/python" -m pip install -qq $packages || return
  # shellcheck disable=SC2086
  [ -z "$alone" ] || "$here/bin/python" -m pip install -qq --no-deps $alone || return
  touch "$here/ready"
}

failed=()
for name in ${TRANSFORMERS_VERSIONS:-4.57.6 5.8.1 5.16.1 5.22.2 5.24.0 kernels fla}; do
  packages="transformers==$name" alone="" select=()
  tests=(tests/test_transformers_versions.py)
  case $name in
    kernels) # the newest that a released transformers accepts
      packages="transformers==5.22.2 kernels==0.17.2"
      tests+=(tests/test_integration_kernels.py)
      ;;
    fla) # its dependencies would bring another torch
      packages="transformers==5.24.0 einops"
      alone="flash-linear-attention==0.6.0 fla-core==0.6.0 triton"
      tests+=(tests/test_integration_fla.py)
      select=(-k fla)
      ;;
  esac
  echo "==> transformers: $name"
  if ! prepare "$folder/$name" "$packages" "$alone"; then
    echo "==> transformers: $name is not tested: not installed: $packages $alone"
    failed+=("$name")
    continue
  fi
  "$folder/$name/bin/python" -m pytest -q -rs -p no:cacheprovider "${tests[@]}" "${select[@]}" "$@" ||
    failed+=("$name")
done

[ ${#failed[@]} = 0 ] || {
  echo "==> transformers: failed: ${failed[*]}"
  exit 1
}

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Installs those of the packages that are missing, where that is possible without asking: as root, with apt.
# Otherwise ends with one line that says what to install.
#
#   install_debian_packages.sh PACKAGE...
set -euo pipefail

missing=()
for package in "$@"; do
  dpkg-query -W -f '${Status}\n' "$package" 2> /dev/null | grep -q '^install ok' || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

fail() {
  echo "not installed: ${missing[*]} ($1; Debian and Ubuntu: apt-get install ${missing[*]})" >&2
  exit 1
}
command -v apt-get > /dev/null || fail "this system has no apt-get"
[ "$(id -u)" = 0 ] || fail "only root may install them"
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ apt-get -q update && apt-get -qy install --no-install-recommends "${missing[@]}"; } > "$log" 2>&1 ||
  fail "apt-get failed: $(tail -n 1 "$log")"

#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Unpacks Debian or Ubuntu packages into a folder, without installing them and without root.
#
#   fetch_debian_packages.sh FOLDER PACKAGE...
#
# The package lists go to a folder of our own, so `apt-get update` needs no root either. Ends with an
# error and one line that says why when a package cannot be had.
set -euo pipefail

folder=$1
shift
fail() {
  echo "cannot fetch $*" >&2
  exit 1
}

command -v apt-get > /dev/null || fail "$*: this system has no apt-get"
command -v dpkg-deb > /dev/null || fail "$*: this system has no dpkg-deb"

mkdir -p "$folder/packages/partial" "$folder/lists/partial"
folder=$(cd "$folder" && pwd)
log="$folder/fetch.log"
cd "$folder/packages"

download() { apt-get -q -o Acquire::Retries=2 "$@" >> "$log" 2>&1; }
own_lists=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache::pkgcache=$folder/pkgcache.bin"
  -o "Dir::Cache::srcpkgcache=$folder/srcpkgcache.bin" -o APT::Sandbox::User=)

: > "$log"
if ! download download "$@"; then
  # No lists on this machine, or lists older than the archive.
  download "${own_lists[@]}" update || fail "$*: apt-get update failed ($(tail -n 1 "$log"))"
  download "${own_lists[@]}" download "$@" || fail "$*: apt-get download failed ($(tail -n 1 "$log"))"
fi
for package in *.deb; do
  dpkg-deb -x "$package" "$folder" || fail "$*: cannot unpack $package"
  rm "$package"
done

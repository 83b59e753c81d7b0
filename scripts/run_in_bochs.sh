#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Runs the C++ tests on an emulated CPU with AVX-512: Bochs boots Debian's kernel with one static program.
# For machines whose CPU lacks AVX-512. About two minutes until the tests begin, then 20 to 100 times slower
# than a real CPU.
#
#   run_in_bochs.sh PYTHON [TEST-ARGUMENT...]      default: every AVX-512 test, and the registry
#
# BOCHS_TIMEOUT=3600: seconds after which it gives up.
set -euo pipefail

python=$1
shift
# Left out: Bochs 2.7 rounds ties away from zero in VCVTPS2PH (for AVX2 too, where real CPUs pass the test).
[ $# -gt 0 ] || set -- --gtest_color=no \
  --gtest_filter='*avx512*:Registry.*-*Fp16IsStoredAsTheScalarConversionDoes*'
root=$PWD
folder=$root/build/emulator
fail() {
  echo "AVX-512 tests in the emulator: $*" >&2
  exit 1
}

bochs=$(command -v bochs-bin || command -v bochs) ||
  fail "bochs is not installed (Debian and Ubuntu: apt-get install bochs)"
offers() { grep -q -e "$2" <<< "$("$bochs" --help $1 2>&1 || true)"; }
offers cpu corei7_skylake_x || fail "this bochs has no CPU with AVX-512"
[ -f /usr/share/vgabios/vgabios.bin ] || fail "vgabios is not installed (apt-get install vgabios)"

mkdir -p "$folder"
if ! ls "$folder"/packages/boot/vmlinuz-* > /dev/null 2>&1; then
  kernel=$(apt-cache depends linux-image-amd64 2> /dev/null | awk '$1 == "Depends:" { print $2; exit }')
  [ -n "$kernel" ] || fail "apt knows no linux-image-amd64 (apt-get update, as root)"
  echo "==> fetching $kernel, isolinux, syslinux-common"
  scripts/fetch_debian_packages.sh "$folder/packages" "$kernel" isolinux syslinux-common ||
    fail "the kernel or the boot loader cannot be had"
fi
"$python" -c 'import pycdlib' 2> /dev/null || "$python" -m pip install -qq pycdlib ||
  fail "pycdlib cannot be installed"

echo "==> building the tests as one static program"
cmake --preset static > "$folder/cmake.log" 2>&1 || fail "cmake failed: $(tail -n 3 "$folder/cmake.log")"
[ ! -f build/cpp-static/not-built.txt ] || fail "$(cat build/cpp-static/not-built.txt)"
cmake --build --preset static
cc -O2 -static scripts/emulator/init.c -o "$folder/init"
strip -o "$folder/tests" build/cpp-static/tests/cpp/deltanet_tests
"$python" scripts/emulator/make_boot_image.py "$folder/boot.iso" "$folder/packages" "$folder/init" \
  "$folder/tests" "$@"

cd "$folder"
rm -f serial.log boot.iso.lock
: > serial.log
echo c > continue.rc # Debian's bochs has a debugger, which waits for this command
debugger=()
offers "" '-rc filename' && debugger=(-rc continue.rc)
export BXSHARE=${BXSHARE:-/usr/share/bochs}

echo "==> booting the emulator (the log grows in build/emulator/serial.log)"
timeout "${BOCHS_TIMEOUT:-3600}" "$bochs" -q -f "$root/scripts/emulator/bochsrc" "${debugger[@]}" \
  < /dev/null > bochs.out 2>&1 &
emulator=$!
tail -n +1 -f --pid="$emulator" serial.log | sed -u 's|\r||' &
wait "$emulator" || true
wait

status=$(sed -n 's/^emulated: exit status \([0-9]*\).*/\1/p' serial.log | tail -n 1)
[ -n "$status" ] || fail "the tests did not end (build/emulator/serial.log, bochs.log)"
exit "$status"

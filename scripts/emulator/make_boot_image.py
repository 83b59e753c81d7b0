# SPDX-License-Identifier: Apache-2.0
"""Makes a CD image that boots Linux, runs one static program and prints to the serial port.

    make_boot_image.py IMAGE PACKAGES INIT PROGRAM [ARGUMENT...]

PACKAGES is a folder with Debian's kernel, isolinux and syslinux-common unpacked.
"""

import io
import stat
import sys
from pathlib import Path

import pycdlib

# clearcpuid: Bochs reports a wrong size of the compacted XSAVE area; Linux then turns AVX off.
KERNEL_ARGUMENTS = (
    "console=ttyS0,115200 quiet panic=-1 mitigations=off nokaslr tsc=reliable random.trust_cpu=on "
    "nosmp acpi=off clearcpuid=xsaves,xsavec rdinit=/init"
)
MENU = f"""SERIAL 0 115200
DEFAULT linux
PROMPT 0
LABEL linux
  KERNEL /VMLINUZ
  APPEND initrd=/INITRD {KERNEL_ARGUMENTS}
"""


class Cpio:
    """An archive in the format that the kernel unpacks into its first file system ("newc")."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.entries = 0

    def add(
        self, name: str, mode: int, data: bytes = b"", device: tuple[int, int] = (0, 0)
    ) -> None:
        self.entries += 1
        path = name.encode() + b"\0"
        fields = (self.entries, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
        self.data += b"070701" + b"".join(b"%08X" % field for field in fields) + path
        self._align()
        self.data += data
        self._align()

    def _align(self) -> None:
        self.data += b"\0" * (-len(self.data) % 4)

    def finished(self) -> bytes:
        self.add("TRAILER!!!", 0)
        return bytes(self.data)


def only(folder: Path, pattern: str) -> bytes:
    return next(iter(sorted(folder.glob(pattern)))).read_bytes()


def main() -> None:
    image, packages, init, program = map(Path, sys.argv[1:5])
    files = Cpio()
    files.add("dev", stat.S_IFDIR | 0o755)
    files.add("dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
    files.add("init", stat.S_IFREG | 0o755, init.read_bytes())
    files.add("tests", stat.S_IFREG | 0o755, program.read_bytes())
    files.add("arguments", stat.S_IFREG | 0o644, "\n".join(sys.argv[5:]).encode())

    cd = pycdlib.PyCdlib()
    cd.new(interchange_level=4)
    for name, data in {
        "ISOLINUX.BIN": only(packages, "usr/lib/ISOLINUX/isolinux.bin"),
        "LDLINUX.C32": only(packages, "usr/lib/syslinux/modules/bios/ldlinux.c32"),
        "ISOLINUX.CFG": MENU.encode(),
        "VMLINUZ": only(packages, "boot/vmlinuz-*"),
        "INITRD": files.finished(),
    }.items():
        cd.add_fp(io.BytesIO(data), len(data), f"/{name}")
    cd.add_eltorito("/ISOLINUX.BIN", boot_load_size=4, boot_info_table=True)
    cd.write(str(image))
    cd.close()


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Every text file ends with exactly one newline, and no line ends with a blank.

check_end_of_file.py [FILE...]      without files: everything that git tracks
"""

import subprocess
import sys
from pathlib import Path


def complaint(path: Path) -> str | None:
    data = path.read_bytes()
    if b"\0" in data or not data:
        return None
    if not data.endswith(b"\n"):
        return "does not end with a newline"
    if data.endswith(b"\n\n"):
        return "ends with an empty line"
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.endswith((b" ", b"\t", b"\r")) and path.suffix != ".md":
            return f"line {number} ends with a blank"
    return None


def main() -> int:
    names = sys.argv[1:]
    if not names:
        listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True)
        names = [name for name in listed.stdout.split("\0") if name]
    bad = {name: why for name in names if Path(name).is_file() and (why := complaint(Path(name)))}
    for name, why in bad.items():
        print(f"{name}: {why}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())

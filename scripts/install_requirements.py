# SPDX-License-Identifier: Apache-2.0
"""Installs a requirements file, and says which requirement cannot be had and why.

    install_requirements.py requirements/test.txt STAMP

When the whole file cannot be installed, each requirement is tried alone. The stamp is written when
nothing is missing; else the file STAMP.missing lists what is, and the next run tries again.
"""

import re
import subprocess
import sys
from pathlib import Path


def pip_install(*arguments: str) -> str | None:
    """None, or why it failed."""
    ran = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-qq", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if ran.returncode == 0:
        return None
    errors = [line for line in ran.stdout.splitlines() if line.startswith("ERROR")]
    return (errors or ran.stdout.splitlines() or ["pip gave no reason"])[-1]


def main() -> None:
    file, stamp = Path(sys.argv[1]), Path(sys.argv[2])
    missing_file = Path(f"{stamp}.missing")
    missing_file.unlink(missing_ok=True)
    print(f"==> installing {file}", flush=True)
    if pip_install("-r", str(file)) is None:
        stamp.touch()
        return
    missing = []
    for line in file.read_text().splitlines():
        requirement = re.sub(r"\s*#.*", "", line).strip()
        if requirement and (why := pip_install(requirement)):
            missing.append(f"not installed: {requirement} ({why})")
            print(f"==> {missing[-1]}", flush=True)
    missing_file.write_text("".join(line + "\n" for line in missing))


if __name__ == "__main__":
    main()

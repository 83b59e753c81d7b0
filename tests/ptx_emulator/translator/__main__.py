# SPDX-License-Identifier: Apache-2.0
"""``python -m translator in.ptx out.cpp [--count]``: one PTX module to one C++ file."""

import argparse
import pathlib

from . import parse, translate


def main() -> None:
    arguments = argparse.ArgumentParser(prog="translator", description=__doc__)
    arguments.add_argument("ptx", type=pathlib.Path)
    arguments.add_argument("cpp", type=pathlib.Path)
    arguments.add_argument(
        "--count", action="store_true", help="count executed instructions by class"
    )
    options = arguments.parse_args()
    module = parse(options.ptx.read_text())
    options.cpp.write_text(translate(module, count=options.count))


if __name__ == "__main__":
    main()

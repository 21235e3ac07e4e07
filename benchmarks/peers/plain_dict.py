"""How much memory a plain dict of str to bytes takes, as bytes for each item, in JSON."""

import argparse
import json
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, required=True)
    parser.add_argument("--size", type=int, required=True, help="bytes of a payload")
    args = parser.parse_args()
    before = _resident()
    items = {f"{number:08}": b"%0*d" % (args.size, number) for number in range(args.items)}
    print(json.dumps({"bytes": (_resident() - before) / len(items)}))


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

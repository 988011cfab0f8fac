"""Lists the hostile images, or writes them into a folder."""

import pathlib
import sys

from . import CASES
from .case import Refused


def main(arguments):
    if len(arguments) != 1:
        sys.exit("usage: python3 -m hostile list | FOLDER")
    if arguments[0] == "list":
        for case in CASES:
            expected = "refused" if isinstance(case.expected, Refused) else "harmless"
            print(f"{case.name:32}  {case.word:6}  {expected:9}  {case.attack}")
        return
    base = pathlib.Path(arguments[0])
    base.mkdir(parents=True, exist_ok=True)
    for case in CASES:
        print(case.write(base))


main(sys.argv[1:])

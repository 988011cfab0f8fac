"""Checks the dependencies of the crates. Prints one line per violation, and exits with 1 if there is one.

Each crate may use only crates of a lower layer; docs/architecture.md has the same diagram. No
crate may have more features in tests than in programs: cargo would compile it, and all that
use it, once for each.
"""

import json
import subprocess
import sys

# A lower number is a lower layer. Every crate must be listed.
LAYERS = {
    "coldrise-formats": 0,
    "coldrise-block": 0,
    "coldrise-files": 0,
    "coldrise-files-init": 1,
    "coldrise-runs": 1,
    "coldrise-schedule": 1,
    "coldrise-line": 1,
    "coldrise-objects": 1,
    "coldrise-store": 1,
    "coldrise-qmp": 1,
    "coldrise-bucket": 2,
    "coldrise-session": 2,
    "coldrise-ingest": 3,
    "coldrise-export": 3,
    "coldrise-inventory": 4,
    "coldrise-nfs": 4,
    "coldrise-fuse": 4,
    "coldrise-capi": 5,
    "coldrise-recovery": 5,
    "coldrise-replica": 5,
    "coldrise-hosting": 6,
    "coldrise-requests": 6,
    "coldrise-cli": 7,
    "coldrise-service": 7,
}


PROGRAMS = ["coldrise-cli", "coldrise-service", "coldrise-capi"]


def built(*arguments: str) -> set[str]:
    """The crates that cargo builds, each with its version and features."""
    command = ["cargo", "tree", "--locked", "--prefix", "none", "--format", "{p} {f}", *arguments]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    return {line.removesuffix(" (*)") for line in answer.stdout.splitlines()}


def other_features() -> set[str]:
    """The crates of the programs that the tests build with other features."""
    programs = built("--edges", "normal,build", *(word for name in PROGRAMS for word in ("-p", name)))
    return programs - built("--workspace")


def main() -> int:
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    problems = []
    for package in json.loads(answer.stdout)["packages"]:
        name = package["name"]
        if name not in LAYERS:
            problems.append(f"{name}: not in the layers of tools/check_dependencies.py")
            continue
        for dependency in package["dependencies"]:
            other = dependency["name"]
            if not other.startswith("coldrise-") or dependency["kind"] == "dev":
                continue
            if LAYERS.get(other, 99) >= LAYERS[name]:
                problems.append(f"{name} must not use {other}: it is not in a lower layer")
    problems += [f"{crate}: other features in tests" for crate in sorted(other_features())]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"dependencies: {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

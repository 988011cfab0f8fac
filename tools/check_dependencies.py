"""Checks that dependencies between the crates only point down.

Each crate may use only crates of a lower layer; docs/architecture.md has the same
diagram. On a violation it prints one line each and exits with 1.
"""

import json
import subprocess
import sys

# A lower number is a lower layer. Every crate must be listed.
LAYERS = {
    "coldrise-formats": 0,
    "coldrise-block": 0,
    "coldrise-runs": 1,
    "coldrise-schedule": 1,
    "coldrise-store": 1,
    "coldrise-qmp": 1,
    "coldrise-session": 2,
    "coldrise-ingest": 2,
    "coldrise-export": 3,
    "coldrise-inventory": 4,
    "coldrise-nfs": 4,
    "coldrise-fuse": 4,
    "coldrise-capi": 5,
    "coldrise-cli": 6,
    "coldrise-service": 6,
}


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
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"dependency direction: {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

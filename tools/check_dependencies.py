"""Checks the dependencies of the crates. Prints one line per violation, and exits with 1 if there is one.

docs/architecture.md lists the crates from the lowest to the highest, each with an arrow to those that it uses: all
but those that it uses through another one. The list must say what the crates' Cargo.toml say, and arrows point up the
page only. No crate may have more features in tests than in programs: cargo would compile it, and all that
use it, once for each.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

DIAGRAM = Path("docs/architecture.md")
PROGRAMS = ["coldrise-cli", "coldrise-service", "coldrise-capi"]
# A part: its folder at the indent of four, then text, which may go on in further lines.
PART = re.compile(r"^    (\w[\w/]*) .*(?:\n {5,}\S.*)*", re.MULTILINE)


def documented() -> dict[str, list[str]]:
    """By folder, in the order of the page: the names after the arrow."""
    text = DIAGRAM.read_text(encoding="utf-8")
    section = text.split("## Parts and their dependencies")[1].split("\n## ")[0]
    arrow = re.compile(r"-> ([\w, \n-]+)$")
    found = {}
    for part in PART.finditer(section):
        names = arrow.search(part[0])
        found[part[1]] = names[1].replace(",", " ").split() if names else []
    return found


def used() -> dict[str, tuple[str, set[str]]]:
    """By crate, without the prefix: its folder, and the crates of ours that its programs use directly."""
    command = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked"]
    answer = subprocess.run(command, check=True, capture_output=True, text=True)
    metadata = json.loads(answer.stdout)
    found = {}
    for package in metadata["packages"]:
        folder = Path(package["manifest_path"]).parent.relative_to(metadata["workspace_root"])
        names = {d["name"] for d in package["dependencies"] if d["kind"] != "dev" and d["name"].startswith("coldrise-")}
        found[package["name"].removeprefix("coldrise-")] = (
            str(folder), {name.removeprefix("coldrise-") for name in names})
    return found


def all_below(crates: dict[str, tuple[str, set[str]]], name: str) -> set[str]:
    direct = crates[name][1]
    return direct.union(*(all_below(crates, other) for other in direct))


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
    crates, diagram = used(), documented()
    order = list(diagram)
    problems = []
    for name, (folder, direct) in crates.items():
        through = set().union(*(all_below(crates, other) for other in direct))
        if folder not in diagram:
            problems.append(f"{folder}: not in {DIAGRAM}")
            continue
        if sorted(diagram[folder]) != sorted(direct - through):
            problems.append(f"{folder}: {DIAGRAM} must say -> {', '.join(sorted(direct - through))}")
        for other in direct:
            if order.index(folder) < order.index(crates[other][0]):
                problems.append(f"{folder} uses {crates[other][0]}, which stands below it in {DIAGRAM}")
    problems += [f"{crate}: other features in tests" for crate in sorted(other_features())]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"dependencies: {len(problems)} violations")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

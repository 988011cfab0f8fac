"""Checks that the modules of a crate do not depend on each other in circles.

Looks at the top-level modules of the store and the session crate: which ones a module names
by `crate::MODULE` or by a name that lib.rs exports from it. Tests do not count. Prints each
circle, and exits with 1 if there is one.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

CRATES = ["server/store/src", "server/session/src"]
EXPORT = re.compile(r"pub(?:\(crate\))? use (\w+)(?:::\w+)*::(\{[^}]*\}|\w+);")
USE = re.compile(r"crate::(\{(?:[^{}]|\{[^{}]*\})*\}|\w+)")


def is_test(path: Path) -> bool:
    return path.stem.endswith("tests") or "tests" in path.parts


def dependencies(source: Path) -> dict[str, set[str]]:
    """By module: the other modules that it names."""
    modules = {path.stem for path in source.iterdir() if path.name != "lib.rs" and not is_test(path)}
    exported = {}
    for module, names in EXPORT.findall((source / "lib.rs").read_text(encoding="utf-8")):
        exported.update(dict.fromkeys(re.findall(r"\w+", names), module))
    found: dict[str, set[str]] = defaultdict(set)
    for path in source.rglob("*.rs"):
        module = path.relative_to(source).parts[0].removesuffix(".rs")
        if module == "lib" or is_test(path):
            continue
        text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {")[0]
        for used in USE.findall(re.sub(r"//.*", "", text)):
            for name in re.findall(r"(?:^|[{,])\s*(\w+)", used):
                other = name if name in modules else exported.get(name)
                if other and other != module:
                    found[module].add(other)
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """The modules that are left when all that end somewhere are taken away."""
    left = {module: set(others) for module, others in graph.items()}
    while True:
        ends = [module for module, others in left.items() if not others & left.keys()]
        if not ends:
            return sorted(left)
        for module in ends:
            del left[module]


def main() -> int:
    problems = 0
    for crate in CRATES:
        modules = circle(dependencies(Path(crate)))
        if modules:
            print(f"{crate}: these modules depend on each other in circles: {', '.join(modules)}", file=sys.stderr)
            problems += 1
    print(f"module circles: {problems}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

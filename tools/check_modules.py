"""Checks that the modules of a crate do not depend on each other in circles.

Looks at the top-level modules of every crate: which ones a module names by `crate::MODULE` or by
a name that lib.rs or main.rs exports from it. Tests do not count. Prints each circle, and exits
with 1 if there is one that is not allowed.
"""

import re
import sys
from pathlib import Path

ROOTS = ("lib.rs", "main.rs")
# The circles that stay: per crate, a module of the circle and the reason.
ALLOWED = {
    "formats/src": ("format", "an error names the format, and a format's checks return errors"),
    "server/cli/src": ("commands", "the arguments list those of each command, and each command takes the invocation"),
    "server/service/src": ("service", "the service owns its parts, and each part works on the service"),
}
EXPORT = re.compile(r"pub(?:\(crate\))? use (?:self::)?(\w+)(?:::\w+)*::(\{[^}]*\}|\w+);")
USE = re.compile(r"\bcrate::(\{(?:[^{}]|\{[^{}]*\})*\}|\w+)")
SUPER = re.compile(r"\b(?:crate|super)::(\{(?:[^{}]|\{[^{}]*\})*\}|\w+)")


def is_test(path: Path) -> bool:
    return path.stem.endswith("tests") or "tests" in path.parts


def dependencies(source: Path) -> dict[str, set[str]]:
    """By module: the other modules that it names."""
    modules = {path.stem for path in source.iterdir() if path.name not in ROOTS and not is_test(path)}
    exported = {}
    for root in filter(Path.is_file, (source / name for name in ROOTS)):
        for module, names in EXPORT.findall(root.read_text(encoding="utf-8")):
            exported.update(dict.fromkeys(re.findall(r"\w+", names), module))
    found: dict[str, set[str]] = {module: set() for module in modules}
    for path in source.rglob("*.rs"):
        parts = path.relative_to(source).parts
        module = parts[0].removesuffix(".rs")
        if parts[0] in ROOTS or is_test(path):
            continue
        text = path.read_text(encoding="utf-8").split("#[cfg(test)]\nmod tests {")[0]
        is_top = len(parts) == 1 or parts[1:] == ("mod.rs",)
        for used in (SUPER if is_top else USE).findall(re.sub(r"//.*", "", text)):
            for name in re.findall(r"(?:^|[{,])\s*(\w+)", used):
                other = name if name in modules else exported.get(name)
                if other and other != module:
                    found[module].add(other)
    return found


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """The largest sets of modules that all depend on each other."""
    reached = {module: set(others) for module, others in graph.items()}
    for middle in graph:
        for others in reached.values():
            if middle in others:
                others |= reached[middle]
    found = {frozenset(other for other in others if module in reached[other]) for module, others in reached.items()}
    return [set(circle) for circle in found if len(circle) > 1]


def main() -> int:
    problems = 0
    crates = sorted({path.parent for path in Path().glob("*/**/src/*.rs") if path.name in ROOTS})
    for crate in crates:
        graph = dependencies(crate)
        for circle in circles(graph):
            if ALLOWED.get(crate.as_posix(), ("", ""))[0] in circle:
                continue
            print(f"{crate}: these modules depend on each other in a circle:", file=sys.stderr)
            for module in sorted(circle):
                print(f"  {module} -> {', '.join(sorted(graph[module] & circle))}", file=sys.stderr)
            problems += 1
    print(f"module circles: {problems}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

"""Moves the entries of changelog/ into CHANGELOG.md, at the end of their sections: run it before a release.

With --check it changes nothing, and exits with 1 if an entry has no section of CHANGELOG.md.
"""

import pathlib
import sys

ROOT = pathlib.Path(__file__).parent.parent
CHANGELOG = ROOT / "CHANGELOG.md"


def main(words: list[str]) -> int:
    lines = CHANGELOG.read_text(encoding="utf-8").splitlines()
    entries = [path for path in sorted((ROOT / "changelog").glob("*.md")) if path.name != "TEMPLATE.md"]
    bad = []
    for path in entries:
        section, _, text = path.read_text(encoding="utf-8").strip().partition("\n\n")
        if section not in lines or not text.startswith("- "):
            bad.append(path)
            continue
        end = lines.index(section) + 2
        while end < len(lines) and lines[end].strip():
            end += 1
        lines[end:end] = text.splitlines()
    for path in bad:
        print(f"{path.relative_to(ROOT)}: not in the form of changelog/TEMPLATE.md", file=sys.stderr)
    if not bad and "--check" not in words:
        CHANGELOG.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for path in entries:
            path.unlink()
    print(f"changelog: {len(entries)} entries, {len(bad)} without a section")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Refuses phrases that readers stumble over: in documents, messages, help, comments of Rust code and the page.

Tests are left out. docs/decisions is history and is left as it was written.
"""

import re
import subprocess
import sys
from pathlib import Path

# Pattern, and what to write.
PHRASES = [
    (r"(?<!there )\b(is|are) no (?!longer\b|more\b|such\b)", "is not a …, is not supported"),
    (r"\bnobody\b", "name the user, or use the passive"),
    (r"\bwhoever\b", "any client that …, users who …"),
    (r"\banew\b", "again; rebuilt, recreated"),
    (r"\b(was|is|are|were|be|been) told\b", "is sent, is reported; gets"),
    (r"\b(goes|went|gone) on\b", "continues, keeps running"),
    (r"\bso (many|much|long)\b(?! (as|that)\b)", "this many, this long"),
    (r"\bof no use\b|\blet go\b|\bcomes? about\b", "unreferenced, released, starts"),
]
# In comments of Rust code only: tests and scripts compare messages.
COMMENT_PHRASES = [
    (r"\b(say|says|said) so\b", "reports it; name what it says"),
    (r"\b(is|are|was|were|be|been) given up\b|\bin vain\b", "is abandoned, is dropped, times out"),
    (r"\bgo on\b", "continue, keep running"),
    (r"\btold\b|\bmade again\b", "sent, reported; rebuilt, recreated"),
]
# A quoted word may be a name: the audit log's user of anonymous requests.
NAMES = {'"nobody"'}

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
COMMENT = re.compile(r"^(?:[^\"]|\"(?:[^\"\\]|\\.)*\")*?(//.*)")


def prose(path: Path, line: str) -> str:
    """The text of a line that people read; empty for code."""
    text = line.strip()
    if path.suffix != ".rs":
        return "" if path.suffix != ".md" and re.match(r"//|/?\*", text) else text
    return " ".join(found for found in LITERAL.findall(text) if f'"{found}"' not in NAMES)


def comment(path: Path, line: str) -> str:
    """The comment of a line of Rust code."""
    found = COMMENT.match(line.strip()) if path.suffix == ".rs" else None
    return LITERAL.sub("", found[1]) if found else ""


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.md", "server/**.rs", "formats/**.rs", "plugins/**.rs", "images/**.rs", "web/src/**.svelte", "web/src/**.ts"],
                            check=True, capture_output=True, text=True).stdout.split()
    problems = 0
    for path in map(Path, listed):
        if "decisions" in path.parts or path.stem.endswith("tests") or "tests" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            checks = [(prose(path, line), PHRASES), (comment(path, line), PHRASES + COMMENT_PHRASES)]
            for text, pattern, advice in [(text, *phrase) for text, phrases in checks for phrase in phrases]:
                found = re.search(pattern, text, re.IGNORECASE)
                if found:
                    print(f"{path}:{number}: {found[0]!r}: write {advice}", file=sys.stderr)
                    problems += 1
    print(f"phrases to avoid: {problems}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

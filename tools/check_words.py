"""Refuses phrases that readers stumble over: in documents, messages, help, comments of Rust code and the page.

Of tests only their names are read. docs/decisions is history and is left as it was written.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
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
# In names of tests only: a name says which behaviour the test proves.
NAME_PHRASES = [
    (r"^(test )?(what|who)\b", "name the subject"),
    (r"\b(is|are) said\b|\bheard of\b|\btells?\b", "is reported, reports"),
]
# A quoted word may be a name: the audit log's user of anonymous requests.
NAMES = {'"nobody"'}

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')
TEST_NAME = re.compile(r"#\[test\]\s*(?:#\[.*\]\s*)*fn (\w+)|^def (test_\w+)", re.MULTILINE)
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


def texts(path: Path) -> Iterator[tuple[int, str, int, list[tuple[str, str]]]]:
    """What is checked: line, text, the end of this line in the text, and phrases. A phrase in a comment may wrap."""
    content = path.read_text(encoding="utf-8")
    for found in TEST_NAME.finditer(content):
        name = (found[1] or found[2]).replace("_", " ")
        yield content.count("\n", 0, found.end()) + 1, name, len(name), NAME_PHRASES + PHRASES + COMMENT_PHRASES
    if "decisions" in path.parts or path.stem.endswith("tests") or "tests" in path.parts:
        return
    lines = content.splitlines()
    for number, (line, following) in enumerate(zip(lines, [*lines[1:], ""], strict=True), 1):
        text = prose(path, line)
        yield number, text, len(text), PHRASES
        text, wrapped = comment(path, line), following.strip()
        whole = f"{text} {comment(path, wrapped).lstrip('/! ')}" if wrapped.startswith("//") else text
        yield number, whole, len(text), PHRASES + COMMENT_PHRASES


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.md", "server/**.rs", "formats/**.rs", "plugins/**.rs", "images/**.rs", "tests/**.py", "web/src/**.svelte", "web/src/**.ts"],
                            check=True, capture_output=True, text=True).stdout.split()
    problems = 0
    for path in map(Path, listed):
        for number, text, end, phrases in texts(path):
            for pattern, advice in phrases:
                found = re.search(pattern, text, re.IGNORECASE)
                if found and found.start() < end:
                    print(f"{path}:{number}: {found[0]!r}: write {advice}", file=sys.stderr)
                    problems += 1
    print(f"phrases to avoid: {problems}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

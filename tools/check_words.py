"""Refuses phrases that readers stumble over, in documents, messages, help and the page.

Comments count only where they are documentation of a command or an option (`///` in
server/cli/src/commands). docs/decisions is history and is left as it was written.
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
    (r"\b(was|is|are|were|be) told\b", "is sent, is reported; gets"),
    (r"\b(goes|went|gone) on\b", "continues, keeps running"),
    (r"\bso (many|much|long)\b(?! (as|that)\b)", "this many, this long"),
    (r"\bof no use\b|\blet go\b|\bcomes? about\b", "unreferenced, released, starts"),
]
# A quoted word may be a name: the audit log's user of anonymous requests.
NAMES = {'"nobody"'}

LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"')


def prose(path: Path, line: str) -> str:
    """What of a line is read by people; empty for code."""
    text = line.strip()
    if path.suffix != ".rs":
        return "" if path.suffix != ".md" and re.match(r"//|/?\*", text) else text
    if text.startswith("///") and "cli/src/commands" in str(path):
        return text
    if text.startswith("//"):
        return ""
    return " ".join(found for found in LITERAL.findall(text) if f'"{found}"' not in NAMES)


def main() -> int:
    listed = subprocess.run(["git", "ls-files", "*.md", "server/**.rs", "formats/**.rs", "plugins/**.rs", "web/src/**.svelte", "web/src/**.ts"],
                            check=True, capture_output=True, text=True).stdout.split()
    problems = 0
    for path in map(Path, listed):
        if "decisions" in path.parts or path.stem.endswith("tests") or "tests" in path.parts:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for pattern, advice in PHRASES:
                found = re.search(pattern, prose(path, line), re.IGNORECASE)
                if found:
                    print(f"{path}:{number}: {found[0]!r}: write {advice}", file=sys.stderr)
                    problems += 1
    print(f"phrases to avoid: {problems}")
    return int(problems > 0)


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Draws docs/ratios.svg from the first table of docs/benchmarks.md: run it when that table has changed."""

import html
import math
import pathlib

DOCS = pathlib.Path(__file__).parent.parent / "docs"
ROW, LEFT, UNIT, TOP = 26, 390, 130, 46  # pixels; UNIT is one power of ten


def rows():
    """(what, peer, how many times as good as the peer) of each row."""
    lines = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    start = lines.index("| what | Coldrise | compared with | its figure | ratio | times as good |") + 2
    for line in lines[start:]:
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        yield cells[0], cells[2], float(cells[5])


def drawing(table):
    width, height = LEFT + round(1.9 * UNIT) + 60, TOP + ROW * len(table) + 12
    middle = LEFT + round(0.6 * UNIT)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           f'font-family="sans-serif" font-size="12">')
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{middle}" y="18" text-anchor="middle" fill="#333333">equal</text>'
    for times in (0.5, 2, 5, 10):
        x = middle + UNIT * math.log10(times)
        yield f'<text x="{x:.0f}" y="36" text-anchor="middle" fill="#777777">{times:g}×</text>'
        yield f'<line x1="{x:.0f}" y1="{TOP - 6}" x2="{x:.0f}" y2="{height - 8}" stroke="#e4e4e4"/>'
    for number, (what, peer, times) in enumerate(table):
        y, length = TOP + ROW * number, UNIT * math.log10(times)
        fill = "#2a7f62" if times >= 0.95 else "#c4622d"
        yield (f'<text x="{LEFT - 10}" y="{y + 13}" text-anchor="end" fill="#333333">{html.escape(what)}'
               f'<tspan fill="#777777"> / {html.escape(peer)}</tspan></text>')
        yield f'<rect x="{middle + min(length, 0):.1f}" y="{y + 1}" width="{max(abs(length), 1):.1f}" height="16" fill="{fill}"/>'
        yield f'<text x="{middle + max(length, 0) + 6:.0f}" y="{y + 13}" fill="#333333">{times:g}×</text>'
    yield f'<line x1="{middle}" y1="{TOP - 22}" x2="{middle}" y2="{height - 8}" stroke="#777777"/>'
    yield "</svg>"


if __name__ == "__main__":
    (DOCS / "ratios.svg").write_text("\n".join(drawing(list(rows()))) + "\n", encoding="utf-8")

#!/usr/bin/env python3
"""Draws docs/ratios.svg from the first table of docs/benchmarks.md, and docs/file-cycles.svg from those of files in a followed
guest: run it when these tables have changed."""

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


def file_cycles():
    """(name, [(MB, cycles per byte)]) of InMage and Coldrise, from both tables."""
    lines = (DOCS / "benchmarks.md").read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        if not line.startswith("| MB of a file, "):
            continue
        content = line.strip("| ").split(" | ")[0].removeprefix("MB of a file, ")
        cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in lines[number + 2:number + 9]]
        pairs = [(float(row[0]), [float(value.replace(",", "")) for value in row[3].split("; ")]) for row in cells]
        names = ("InMage, compression " + ("off" if "random" in content else "on"), f"Coldrise, {content}")
        for which, name in enumerate(names):
            yield name, [(size, values[which]) for size, values in pairs]


def cycles_drawing(series):
    """Cycles per byte, logarithmic, over the size of the files."""
    width, height, left, top, right = 640, 340, 60, 30, 200

    def at(size, cycles):
        x = left + (width - left - right) * size / 250
        return f"{x:.1f},{top + (height - top - 40) * (math.log10(2000) - math.log10(cycles)) / math.log10(200):.1f}"

    yield (f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
           f'font-family="sans-serif" font-size="12">')
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    yield f'<text x="{left - 40}" y="16" fill="#333333">processor cycles for each byte written, all parts</text>'
    for cycles in (10, 30, 100, 300, 1000):
        y = at(0, cycles).split(",")[1]
        yield f'<line x1="{left}" y1="{y}" x2="{width - right}" y2="{y}" stroke="#e4e4e4"/>'
        yield f'<text x="{left - 8}" y="{y}" dy="4" text-anchor="end" fill="#777777">{cycles}</text>'
    for size in (1, 50, 100, 150, 200, 250):
        yield f'<text x="{at(size, 10).split(",")[0]}" y="{height - 22}" text-anchor="middle" fill="#777777">{size}</text>'
    yield f'<text x="{width - right}" y="{height - 6}" text-anchor="end" fill="#777777">MB of a file</text>'
    for (name, points), stroke in zip(series, ("#c4622d", "#2a7f62", "#e0a080", "#80c0a8")):
        yield f'<polyline points="{" ".join(at(*point) for point in points)}" fill="none" stroke="{stroke}" stroke-width="2"/>'
        x, y = at(*points[-1]).split(",")
        yield f'<text x="{float(x) + 8:.1f}" y="{y}" dy="4" fill="{stroke}">{html.escape(name)}</text>'
    yield "</svg>"


if __name__ == "__main__":
    (DOCS / "file-cycles.svg").write_text("\n".join(cycles_drawing(list(file_cycles()))) + "\n", encoding="utf-8")
    (DOCS / "ratios.svg").write_text("\n".join(drawing(list(rows()))) + "\n", encoding="utf-8")

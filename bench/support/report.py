"""Results as JSON and as Markdown for docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .figures import COLDRISE, Row, Spread, Target
from .setting import Setting

_NOT_MEASURED = "not measured"


def number(value: float) -> str:
    """Three or four significant digits, with thousands separators."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    if abs(value) >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.4f}"


def _with_range(spread: Spread | None, unit: str = "") -> str:
    if spread is None:
        return _NOT_MEASURED
    unit_text = f" {unit}" if unit else ""
    if spread.low == spread.high:
        return f"{number(spread.median)}{unit_text}"
    return f"{number(spread.median)}{unit_text} ({number(spread.low)}–{number(spread.high)})"


def _comparison(row: Row, target: Target) -> list[str]:
    compared, is_met = row.verdict(target)
    verdict = "–" if is_met is None else ("met" if is_met else "**missed**")
    if target.against is None:
        return ["–", "–", "–", target.text(row.unit), verdict]
    return [
        target.against,
        _with_range(row.spread(target.against), row.unit),
        _with_range(compared),
        target.text(row.unit),
        verdict,
    ]


def _lines(row: Row) -> list[list[str]]:
    """One line per target; contestants without a target follow for reference."""
    comparisons = [_comparison(row, target) for target in row.targets]
    aimed_at = {target.against for target in row.targets}
    for name in row.samples:
        if name == COLDRISE or name in aimed_at:
            continue
        ratio = row.ratio(name)
        comparisons.append(
            [name, _with_range(row.spread(name), row.unit), _with_range(ratio) if ratio else "–", "–", "–"]
        )
    if not comparisons:
        comparisons = [["–"] * 5]
    lines = []
    for index, comparison in enumerate(comparisons):
        ours = _with_range(row.spread(COLDRISE), row.unit) if index == 0 else ""
        lines.append([row.title if index == 0 else "", row.subject if index == 0 else "", ours, *comparison])
    return lines


def _table(rows: list[Row]) -> list[str]:
    head = ["what", "disk", "Coldrise", "compared with", "its figure", "Coldrise / it", "target", ""]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        lines += ["| " + " | ".join(cells) + " |" for cells in _lines(row)]
    return lines


def _commands(rows: list[Row]) -> list[str]:
    lines: list[str] = []
    seen: set[tuple[str, str, str]] = set()
    for row in rows:
        key = (row.title, row.command, row.note)
        if key in seen or not (row.command or row.note):
            continue
        seen.add(key)
        note = f" ({row.note})" if row.note else ""
        command = f": `{row.command}`" if row.command else ""
        lines.append(f"- {row.title}, {row.subject}{note}{command}")
    return lines


def as_markdown(setting: Setting, surroundings: dict[str, str]) -> str:
    lines = []
    if setting.is_quick:
        lines += ["**A quick run on small disks: it shows that the measurements work; its figures mean nothing.**", ""]
    lines += ["Median of the rounds, lowest and highest in parentheses; the ratio is taken inside each round.", ""]
    lines += _table(setting.rows)
    if setting.left_out:
        lines += ["", "Left out:", ""]
        lines += [f"- {name}: {why}" for name, why in setting.left_out.items()]
    if setting.failures:
        lines += ["", "Could not be measured:", ""]
        lines += [f"- {' '.join(failure.split())}" for failure in setting.failures]
    lines += ["", "How each was taken:", ""]
    lines += _commands(setting.rows)
    lines += ["", "Measured on:", ""]
    lines += [f"- {name}: {value}" for name, value in surroundings.items()]
    return "\n".join(lines) + "\n"


def _row_as_json(row: Row) -> dict[str, Any]:
    targets = []
    for target in row.targets:
        compared, is_met = row.verdict(target)
        targets.append(
            {**asdict(target), "compared": asdict(compared) if compared else None, "is_met": is_met}
        )
    ratios = {name: row.ratio(name) for name in row.samples if name != COLDRISE}
    return {
        "measurement": row.measurement,
        "title": row.title,
        "disk": row.subject,
        "unit": row.unit,
        "samples": row.samples,
        "spreads": {name: asdict(spread) for name in row.samples if (spread := row.spread(name))},
        "ratios": {name: asdict(ratio) for name, ratio in ratios.items() if ratio},
        "targets": targets,
        "command": row.command,
        "note": row.note,
    }


def as_json(setting: Setting, surroundings: dict[str, str]) -> dict[str, Any]:
    return {
        "is_quick": setting.is_quick,
        "sizes": asdict(setting.sizes),
        "machine": surroundings,
        "left_out": setting.left_out,
        "failures": setting.failures,
        "rows": [_row_as_json(row) for row in setting.rows],
    }

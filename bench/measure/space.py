"""The stored size of seven points of a working guest, and the time to restore the last
one: by chunk size and compression, and against common programs at their best
compression.

There are a full backup and six more; a fifth of the guest's data changes between them
(see `bench.support.churn`). This is the classic comparison of deduplicating stores:
smaller pieces find more duplicates, but restores and the index cost more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from bench.support import images
from bench.support.churn import WorkingGuest
from bench.support.commands import run, settle, stored_bytes
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB
from bench.support.peers import Borg, ColdriseTool, Restic, Tool
from bench.support.plot import space_plot
from bench.support.setting import Setting

SUMMARY = "space of seven points of a guest, by chunk size and compression, against restic and borg"

DAYS = 7
_CHANGED_SHARE = 0.20
_DATABASE_BYTES = 120 * MIB
_SIZES = ("4K", "8K", "16K", "32K", "64K")
_STANDARD, _MAXIMUM = "zstd:1", "zstd:19"
# For the repositories that are compared with other programs.
_PEERS_SIZES = ("8K", "16K")
_STORED = "seven points, stored"
_RESTORE = "restore of the seventh"


@dataclass(frozen=True)
class Churn:
    name: str
    pages_share: float
    text: str


_CHURNS = (
    Churn("files", 0.0, "files replaced by others"),
    Churn("files and pages", 0.5, "half of it files replaced, half pages of 8 KiB rewritten in a database"),
)


class _ResticMax(Restic):
    name = "restic"

    def store(self, image: Path) -> float:
        self._env["RESTIC_COMPRESSION"] = "max"
        return super().store(image)


class _BorgMax(Borg):
    name = "borg"

    def store(self, image: Path) -> float:
        self._day = getattr(self, "_day", 0) + 1
        run(["borg", "create", "-C", "zstd,22", f"::{self._day}", image.name], env=self._env, cwd=image.parent)
        return 0.0


def measure(setting: Setting) -> None:
    """A quick run has two days, two sizes, and no slow compression."""
    days_count = 2 if setting.is_quick else DAYS
    sizes = _PEERS_SIZES if setting.is_quick else _SIZES
    maximum = "zstd:3" if setting.is_quick else _MAXIMUM
    for churn in _CHURNS:
        folder = setting.folder("space")
        days = _days(setting, folder, churn, days_count)
        stored_mib: dict[str, float] = {}
        if churn is _CHURNS[-1]:
            stored_mib = _by_chunk_size(setting, folder, churn, days, sizes, maximum)
        _against_peers(setting, folder, churn, days, maximum, stored_mib)
        images.removed(folder)


def _days(setting: Setting, folder: Path, churn: Churn, count: int) -> list[Path]:
    """The guest's disk at each backup."""
    disk = folder / "disk.raw"
    run(["cp", "--sparse=always", setting.guest().path, disk])
    guest = WorkingGuest(disk, folder / "mounted")
    if churn.pages_share:
        guest.add_database(_DATABASE_BYTES)
    days = []
    for day in range(count):
        if day:
            changed = guest.work(_CHANGED_SHARE, churn.pages_share)
            setting.say(f"  space, {churn.name} · day {day}: {changed / MIB:.0f} MiB changed")
        days.append(folder / f"day-{day}.raw")
        run(["cp", "--sparse=always", disk, days[-1]])
    disk.unlink()
    return days


def _store_all(tool: Tool, folder: Path, days: list[Path]) -> None:
    """Stores every day under the same path, like a real disk."""
    tool.prepare()
    disk = folder / "disk.raw"
    for day in days:
        disk.unlink(missing_ok=True)
        os.link(day, disk)
        tool.store(disk)
    disk.unlink()


def _against_peers(
    setting: Setting, folder: Path, churn: Churn, days: list[Path], maximum: str, stored_mib: dict[str, float]
) -> None:
    """`stored_mib` is the size stored already, by chunk size."""

    def lane(make: Callable[[Path], Tool]):
        def contestant() -> dict[str, float]:
            place = setting.folder("space/store")
            try:
                tool = make(place)
                _store_all(tool, folder, days)
                return {_STORED: stored_bytes(tool.stored) / MIB}
            finally:
                images.removed(place)

        return contestant

    def known(value: float):
        return lambda: {_STORED: value}

    peers = {"restic": lane(_ResticMax), "borg": lane(_BorgMax)}
    for size in _PEERS_SIZES:
        ours = lane(lambda place: ColdriseTool(place, setting.program, size, maximum))  # noqa: B023
        if size in stored_mib:
            ours = known(stored_mib[size])
        results = setting.race(f"space, {churn.name}, {size}", {COLDRISE: ours, **peers}, 1)
        columns = column(results, _STORED)
        # Their size does not depend on ours.
        peers = {name: known(columns[name][0]) for name in peers if columns[name][0] is not None}
        note = f"a fifth changed six times: {churn.text}; {size}, {maximum}, restic --compression max, borg -C zstd,22"
        targets = [Target(name, at_most=0.6) for name in peers]
        setting.add(Row("space", _STORED, f"guest, {churn.name}, chunks of {size}", "MiB", columns, targets, "", note))


def _by_chunk_size(
    setting: Setting, folder: Path, churn: Churn, days: list[Path], sizes: tuple[str, ...], maximum: str
) -> dict[str, float]:
    """Writes the table and its plot. Returns the MiB stored with maximum compression, by chunk size."""
    logical = sum(day.stat().st_blocks * 512 for day in days)
    kept: dict[str, ColdriseTool] = {}
    stored: dict[str, float] = {}
    for compression in (_STANDARD, maximum):
        for size in sizes:
            name = f"{size} {compression}"
            tool = ColdriseTool(setting.folder(f"space/{size}-{compression[5:]}"), setting.program, size, compression)
            _store_all(tool, folder, days)
            kept[name], stored[name] = tool, tool.stored_mib()
            setting.say(f"  space · {name}: {stored[name]:,.0f} MiB, a reduction to {logical / MIB / stored[name]:.1f} : 1")

    def restoring(tool: ColdriseTool):
        def contestant() -> dict[str, float]:
            tool.preread()
            settle(setting.work)
            target = folder / "restored.raw"
            took_s = tool.restore(days[-1], target)
            run(["cmp", days[-1], target])
            target.unlink()
            return {_RESTORE: took_s}

        return contestant

    results = setting.race("space", {name: restoring(tool) for name, tool in kept.items()}, setting.sizes.few_rounds)
    columns = column(results, _RESTORE)
    restore_s = {name: min(value for value in columns[name] if value is not None) for name in columns}
    lines = ["| chunk | compression | stored MiB | reduction | restore s |", "|---|---|---|---|---|"]
    for name in kept:
        size, compression = name.split()
        lines.append(
            f"| {size} | {compression} | {stored[name]:,.0f} | {logical / MIB / stored[name]:.1f} : 1 | {restore_s[name]:.2f} |"
        )
    text = "\n".join(lines) + f"\n\n{logical / MIB:,.0f} MiB of data in {len(days)} points ({churn.text}); fastest restore of {setting.sizes.few_rounds} rounds.\n"
    (setting.store / "space.md").write_text(text)
    setting.say(text)
    space_plot(
        setting.store / "space.svg",
        sizes,
        {
            f"{label} ({compression})": (
                [logical / MIB / stored[f"{size} {compression}"] for size in sizes],
                [restore_s[f"{size} {compression}"] for size in sizes],
            )
            for label, compression in (("standard", _STANDARD), ("maximum", maximum))
        },
    )
    return {size: stored[f"{size} {maximum}"] for size in sizes}

"""Garbage collection in a repository of a million chunks after half of them was
forgotten. Wall times of the command, including process start."""

from __future__ import annotations

from pathlib import Path

from bench.support import images
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB
from bench.support.setting import Setting

SUMMARY = "gc after half of a million chunks was forgotten"

_CHUNK_BYTES = 4096
_APART = "gc, the forgotten half in files of its own"
_SCATTERED = "gc, half of every file forgotten"
_PIECE_BYTES = 64 << 10


def measure(setting: Setting) -> None:
    folder = setting.folder("gc")
    disk = images.many_chunks(setting.store / "images", setting.sizes.many_chunks_bytes, _CHUNK_BYTES)
    low, high, striped = (folder / f"{name}.raw" for name in ("low", "high", "striped"))
    half = disk.size_bytes // 2
    _copy(disk.path, low, 0, half)
    _copy(disk.path, high, half, half)
    _stripe(disk.path, striped)
    turn = 0

    def sample_one(backups: list[tuple[str, Path]], forgotten: str) -> float:
        nonlocal turn
        turn += 1
        coldrise = setting.new_coldrise(folder / f"repository{turn}")
        coldrise.init(chunk_size="4K", compression="none")
        for machine, path in backups:
            coldrise.call("backup", machine, f"vda=raw:{path}")
        coldrise.call("forget", f"{forgotten}/latest")
        settle(setting.work)
        took_s = coldrise.call_timed("gc")
        images.removed(coldrise.repository)
        return took_s

    def sample() -> dict[str, float]:
        return {
            _APART: sample_one([("low", low), ("high", high)], "low"),
            # The second point holds every second piece of the first.
            _SCATTERED: sample_one([("all", disk.path), ("striped", striped)], "all"),
        }

    results = setting.race("gc", {COLDRISE: sample}, setting.sizes.few_rounds)
    note = (
        f"coldrise gc; {disk.size_bytes // _CHUNK_BYTES:,} chunks of 4 KiB, {disk.size_bytes / MIB:,.0f} MiB, "
        "no compression; a backup leaves its files outside the page cache"
    )
    for title in (_APART, _SCATTERED):
        setting.add(
            Row("gc", title, "many-chunks", "s", column(results, title), [Target(at_most=10)], "", note)
        )
    images.removed(folder)


def _copy(source: Path, target: Path, offset: int, length: int) -> None:
    with open(source, "rb") as reading, open(target, "wb") as writing:
        reading.seek(offset)
        for _ in range(length // MIB):
            writing.write(reading.read(MIB))


def _stripe(source: Path, target: Path) -> None:
    """Every second piece, with holes between them."""
    size = source.stat().st_size
    with open(source, "rb") as reading, open(target, "wb") as writing:
        writing.truncate(size)
        for offset in range(0, size, 2 * _PIECE_BYTES):
            reading.seek(offset)
            writing.seek(offset)
            writing.write(reading.read(_PIECE_BYTES))

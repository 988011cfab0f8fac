"""Copies in another repository of this host: how long they take, and what chunk size and compression make of a
restore. `coldrise copy` makes all the repositories of the table from one."""

from __future__ import annotations

import random
from pathlib import Path

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import run, settle, stored_bytes
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB
from bench.support.offsite import part_of
from bench.support.plot import copies_plot
from bench.support.setting import Setting

SUMMARY = "local copies beside a backup; restore and reduction by chunk size and compression, of repositories that copy made"

_BACKUP = "coldrise backup"
_COPY, _RECHUNKED = "copy to another repository", "copy to chunks of 64K"
_SIZES = ("4K", "8K", "16K", "32K", "64K")
_STANDARD, _MAXIMUM = "zstd:1", "zstd:19"
_POINTS = 3
_PART_BYTES = 192 * MIB
_PAGE_BYTES = 8 << 10
# Of an appliance of 2019, with 1.45 TB of backups: reduction and MB/s of a restore, at 4 KB and at 64 KB.
_THEIRS = {"standard": ((3.3, 2.4), (95, 134)), "maximum": ((3.8, 3.0), (69, 151))}


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    _beside_a_backup(setting)
    _by_chunk_size(setting)


def _beside_a_backup(setting: Setting) -> None:
    disk = setting.disks()[0]
    source = setting.coldrise(disk)

    def copied(chunk_size: str | None):
        def lane() -> dict[str, float]:
            folder = setting.folder("copies")
            try:
                far = Coldrise(setting.program, folder / "far")
                far.init(chunk_size=chunk_size)
                settle(setting.work)
                took_s = source.call_timed("copy", disk.name, "--to", far.repository, "--to-passphrase-file",
                                           far.env["COLDRISE_PASSPHRASE_FILE"])
                return {_COPY if chunk_size is None else _RECHUNKED: took_s}
            finally:
                images.removed(folder)

        return lane

    def backed_up() -> dict[str, float]:
        folder = setting.folder("copies")
        try:
            fresh = Coldrise(setting.program, folder / "fresh")
            fresh.init()
            settle(setting.work)
            took_s = fresh.call_timed("backup", disk.name, f"vda=raw:{disk.path}")
            return {_COPY: took_s, _RECHUNKED: took_s}
        finally:
            images.removed(folder)

    for kind, chunk_size, most in ((_COPY, None, 1.2), (_RECHUNKED, "64K", 1.5)):
        results = setting.race(f"copies, {kind}", {COLDRISE: copied(chunk_size), _BACKUP: backed_up}, setting.sizes.few_rounds)
        setting.add(Row("copies", kind, disk.name, "s", column(results, kind), [Target(_BACKUP, at_most=most)],
                        "coldrise copy --to DIR", "the whole command, until it is on the disk; beside a backup of the same disk"))


def _points(setting: Setting, folder: Path) -> tuple[Coldrise, Path, int]:
    """A repository with points of a part of the guest's disk; the last content; bytes of data in all points."""
    count = min(_PART_BYTES, setting.sizes.disk_bytes)
    guest = setting.guest()
    disk = part_of(guest.path, folder / "disk.raw", guest.window_offset_bytes, count)
    source = Coldrise(setting.program, folder / "source")
    source.init()
    rest = part_of(guest.path, folder / "rest.raw", 0, guest.window_offset_bytes or count).read_bytes()
    chosen = random.Random(9)
    for number in range(_POINTS):
        if number:
            with open(disk, "r+b") as made:
                for offset in images.scattered(count, _PAGE_BYTES, 0.10, seed=number):
                    made.seek(offset)
                    # Content as it is elsewhere on the disk, in other places of a chunk.
                    at = chosen.randrange(0, len(rest) - _PAGE_BYTES, 512)
                    made.write(rest[at : at + _PAGE_BYTES])
        source.call("backup", "web01", f"vda=raw:{disk}")
    return source, disk, _POINTS * count


def _by_chunk_size(setting: Setting) -> None:
    folder = setting.folder("copies-by-size")
    source, disk, logical_bytes = _points(setting, folder)
    sizes = ("8K", "64K") if setting.is_quick else _SIZES
    compressions = {"standard": _STANDARD, "maximum": "zstd:3" if setting.is_quick else _MAXIMUM}
    stored: dict[tuple[str, str], Coldrise] = {}
    copied_s: dict[tuple[str, str], float] = {}
    for label, compression in compressions.items():
        for size in sizes:
            far = Coldrise(setting.program, folder / f"{size}-{label}")
            far.init(chunk_size=size, compression=compression)
            copied_s[size, label] = source.call_timed(
                "copy", "--to", far.repository, "--to-passphrase-file", far.env["COLDRISE_PASSPHRASE_FILE"])
            stored[size, label] = far

    def restoring(far: Coldrise):
        def lane() -> dict[str, float]:
            far.preread()
            settle(setting.work)
            target = folder / "restored.raw"
            took_s = far.call_timed("restore", "web01/latest/vda", target)
            run(["cmp", disk, target])
            target.unlink()
            return {"restore": took_s}

        return lane

    results = setting.race("copies", {" ".join(key): restoring(far) for key, far in stored.items()}, setting.sizes.few_rounds)
    columns = column(results, "restore")
    disk_bytes = disk.stat().st_size
    reductions = {key: logical_bytes / stored_bytes(far.repository) for key, far in stored.items()}
    rates = {key: disk_bytes / 1e6 / min(value for value in columns[" ".join(key)] if value) for key in stored}
    lines = ["| chunk | compression | reduction | restore, MB/s | copy, s |", "|---|---|---|---|---|"]
    lines += [f"| {size} | {compressions[label]} | {reductions[size, label]:.2f} : 1 | {rates[size, label]:.0f} | {copied_s[size, label]:.1f} |"
              for size, label in stored]
    for label, (theirs, restored) in _THEIRS.items():
        for at, size in enumerate(("4K", "64K")):
            lines.append(f"| {size} | theirs, {label} | {theirs[at]} : 1 | {restored[at]} | |")
    text = "\n".join(lines) + (f"\n\n{_POINTS} points of {disk_bytes // MIB} MiB of the guest's disk, 10 % of it rewritten in pages of 8 KiB between them. "
                               "Restores read a repository in the page cache; theirs a disk array.\n")
    (setting.store / "copies.md").write_text(text)
    setting.say(text)
    copies_plot(setting.store / "copies.svg", sizes, {
        f"{label} ({compression})": ([reductions[size, label] for size in sizes], [rates[size, label] for size in sizes])
        for label, compression in compressions.items()}, _THEIRS)
    images.removed(folder)

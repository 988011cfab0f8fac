"""Copies to another site beside the programs that others use: restic copy, rsync -z and zstd over ssh, cold and
after changes, on the same line. The peers get CUBIC and then BBR: Coldrise chooses BBR itself where it is allowed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Callable

from bench.support.commands import run
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB, removed, scattered
from bench.support.offsite import USUAL, Sites, ended, part_of, ssh_server
from bench.support.postgres import database_disk
from bench.support.setting import Setting
from tests.support.line import FAR_ADDRESS, Line

SUMMARY = "copies to another site beside restic copy, rsync -z and zstd over ssh, cold and after changes"

_COLD, _LATER = "cold", "after changes"
_COPIED_BYTES = 128 * MIB
_DATABASE_MIB = 512
_WRITE_BYTES = 16 << 10
_ASKED = 2.0


@dataclass(frozen=True)
class _Subject:
    """A disk before and after changes."""

    name: str
    before: Path
    after: Path
    text: str


def measure(setting: Setting) -> None:
    folder = setting.folder("offsite-peers")
    guest = _guest_part(setting, folder)
    database = _database(setting)
    for subject, control in ((guest, "cubic"), (guest, "bbr"), (database, "cubic")):
        lanes = {COLDRISE: _ours, "restic copy": _restic, "rsync -z": _rsync, "zstd -3 | ssh": _zstd}

        def lane(measured: Callable, subject=subject, control=control) -> Callable[[], dict[str, float]]:
            return lambda: _on_line(setting, subject, control, measured)

        results = setting.race(f"offsite, {subject.name}, {control}", {name: lane(work) for name, work in lanes.items()}, 1)
        for kind in (_COLD, _LATER):
            columns = column(results, kind)
            targets = [Target(name, at_least=_ASKED) for name in columns if name != COLDRISE]
            setting.add(Row("offsite_peers", f"copy over a line beside others, {kind}", f"{subject.name}; {USUAL.text()}; peers on {control}",
                            "Mbit/s of the disk", columns, targets, "", subject.text))
    removed(folder)


def _guest_part(setting: Setting, folder: Path) -> _Subject:
    count = min(_COPIED_BYTES, setting.sizes.disk_bytes)
    guest = setting.guest()
    before = part_of(guest.path, folder / "before.raw", guest.window_offset_bytes, count)
    after = part_of(before, folder / "after.raw", 0, count)
    with open(after, "r+b") as made:
        for offset in scattered(count, _WRITE_BYTES, 0.01, seed=5):
            made.seek(offset)
            made.write(os.urandom(_WRITE_BYTES))
    return _Subject("guest", before, after, f"{count // MIB} MiB of the guest's disk; then 1 % changed by 16 KiB writes of random bytes")


def _database(setting: Setting) -> _Subject:
    disk = database_disk(setting.store / "images", 224 if setting.is_quick else _DATABASE_MIB)
    text = f"PostgreSQL's data and log, {disk.before.stat().st_size // MIB} MiB; then {disk.transactions // 4} transactions"
    return _Subject("database", disk.before, disk.after, text)


def _on_line(setting: Setting, subject: _Subject, control: str, measured: Callable) -> dict[str, float]:
    folder = setting.folder("offsite-lane")
    try:
        # The networks see only what is mounted before.
        with contextlib.closing(USUAL.line(folder, control)) as line:
            disk = folder / "disk.raw"
            run(["cp", "--sparse=always", subject.before, disk])
            times = measured(setting, line, folder, disk, lambda: run(["cp", "--sparse=always", subject.after, disk]))
            size = subject.before.stat().st_size
            return {kind: size * 8 / took_s / 1e6 for kind, took_s in zip((_COLD, _LATER), times)}
    finally:
        removed(folder)


def _timed(work: Callable[[], object]) -> float:
    start = time.monotonic()
    work()
    return time.monotonic() - start


def _same(one: Path, other: Path) -> None:
    run(["cmp", one, other])


def _ours(setting: Setting, line: Line, folder: Path, disk: Path, change: Callable) -> list[float]:
    with Sites(setting.program, line, folder).paired() as sites:
        times = []
        for is_later in (False, True):
            if is_later:
                change()
            sites.near.call("backup", "web01", f"vda=raw:{disk}")
            times.append(sites.copied("web01").elapsed_s)
        sites.far.call("restore", "web01/latest/vda", folder / "restored.raw")
        _same(disk, folder / "restored.raw")
        return times


def _restic(_setting: Setting, line: Line, folder: Path, disk: Path, change: Callable) -> list[float]:
    password = secrets.token_hex(16)
    near = {"RESTIC_REPOSITORY": str(folder / "near"), "RESTIC_PASSWORD": password, "RESTIC_CACHE_DIR": str(folder / "cache")}
    with ssh_server(line, folder) as client:
        far = {"RESTIC_REPOSITORY": f"sftp:root@{FAR_ADDRESS}:{folder}/far", "RESTIC_PASSWORD": password,
               "RESTIC_FROM_REPOSITORY": str(folder / "near"), "RESTIC_FROM_PASSWORD": password,
               "RESTIC_CACHE_DIR": str(folder / "cache")}
        sftp = ["-o", f"sftp.command={shlex.join([*client, '-s'])} sftp"]
        run(["restic", "-q", "init", "--repository-version", "2"], env=near)
        ended(line.near, ["restic", "-q", *sftp, "init", "--repository-version", "2", "--copy-chunker-params"], far)
        times = []
        for is_later in (False, True):
            if is_later:
                change()
            run(["restic", "-q", "backup", disk], env=near)
            times.append(_timed(lambda: ended(line.near, ["restic", "-q", *sftp, "copy", "latest"], far)))
        run(["restic", "-q", "restore", "latest", "--target", folder / "out"], env={**near, "RESTIC_REPOSITORY": str(folder / "far")})
        _same(disk, folder / "out" / disk.relative_to("/"))
        return times


def _rsync(_setting: Setting, line: Line, folder: Path, disk: Path, change: Callable) -> list[float]:
    with ssh_server(line, folder) as client:
        shell, copy = shlex.join(client[:-1]), folder / "copy.raw"
        times = []
        for is_later in (False, True):
            if is_later:
                change()
            argv = ["rsync", "-z", "--inplace", "--no-whole-file", "--ignore-times", "-e", shell, disk, f"root@{FAR_ADDRESS}:{copy}"]
            times.append(_timed(lambda: ended(line.near, argv, {})))
        _same(disk, copy)
        return times


def _zstd(_setting: Setting, line: Line, folder: Path, disk: Path, change: Callable) -> list[float]:
    with ssh_server(line, folder) as client:
        copy = folder / "copy.raw"
        times = []
        for is_later in (False, True):
            if is_later:
                change()
            there = shlex.join([*client, f"zstd -q -d -f -o {copy}"])
            # It does not know the existing content: all is sent again.
            pipe = ["bash", "-o", "pipefail", "-c", f"zstd -q -3 -T2 -c {disk} | {there}"]
            times.append(_timed(lambda: ended(line.near, pipe, {})))
        _same(disk, copy)
        return times

"""The time until a 4 KiB write is durable: write and flush through NBD into a
session, against pwrite and fdatasync on a raw file of the same file system. A
session writes a slot and its record, in two pages, so the limit is the time of two
pages and one fdatasync."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Callable

from bench.support import fio, images
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.servers import nbdkit_file
from bench.support.setting import Setting

SUMMARY = "latency of a 4 KiB write with its flush"

_FILE = "pwrite + fdatasync"
_NBDKIT = "nbdkit file"
_LIMIT = "two pwrites + fdatasync"
_TITLE = "4K write + flush QD1"
_WRITTEN = "written to the drive for each of them"
_PAGE = 4096


def _written_bytes(path: Path) -> int:
    """Written to the drive that holds `path` since the start of the machine."""
    device = os.stat(path).st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    return int(stat[6]) * 512


def _figures(setting: Setting, load: Callable[[], float]) -> dict[str, float]:
    """`load` returns operations per second over the setting's time."""
    settle(setting.work)
    before = _written_bytes(setting.work)
    rate = load()
    operations = rate * setting.sizes.seconds
    written = _written_bytes(setting.work) - before
    return {_TITLE: 1e6 / rate, _WRITTEN: written / operations / 1024}


def _two_pages(raw: Path, seconds: float) -> float:
    pages = raw.stat().st_size // _PAGE
    numbers = random.Random(1)
    content = os.urandom(_PAGE)
    operations, file = 0, os.open(raw, os.O_WRONLY)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(2):
            os.pwrite(file, content, numbers.randrange(pages) * _PAGE)
        os.fdatasync(file)
        operations += 1
    os.close(file)
    return operations / seconds


def measure(setting: Setting) -> None:
    disk = setting.disks()[0]
    folder = setting.folder("raw")
    raw = images.full_copy(disk, folder / "disk.raw")
    load = Load("randwrite", "4k", 1, disk.window_bytes, disk.window_offset_bytes,
                seconds=setting.sizes.seconds)
    over_nbd = load.with_extra("--fsync=1")
    on_file = load.with_extra("--fdatasync=1")
    turn = 0

    def session() -> dict[str, float]:
        nonlocal turn
        turn += 1
        coldrise = setting.coldrise(disk)
        name = f"flush{turn}"
        coldrise.publish(disk.name, name)
        with coldrise.serve(setting.socket("coldrise")) as server:
            uri = server.uri(f"live/{name}/vda")
            figures = _figures(setting, lambda: fio.over_nbd(over_nbd, uri).operations_per_s)
        coldrise.discard(name)
        return figures

    def file() -> dict[str, float]:
        return _figures(setting, lambda: fio.on_file(on_file, raw).operations_per_s)

    def limit() -> dict[str, float]:
        return _figures(setting, lambda: _two_pages(raw, setting.sizes.seconds))

    def nbdkit() -> dict[str, float]:
        with nbdkit_file(raw, setting.socket("nbdkit")) as server:
            return _figures(
                setting, lambda: fio.over_nbd(over_nbd, server.uri()).operations_per_s)

    # A disk's sync times vary more than any other figure here: one more round.
    results = setting.race(
        _TITLE, {COLDRISE: session, _FILE: file, _LIMIT: limit, _NBDKIT: nbdkit},
        setting.sizes.rounds + 1,
    )
    setting.add(
        Row("flush_latency", _TITLE, disk.name, "µs", column(results, _TITLE),
            [Target(_FILE, at_most=1.2)], over_nbd.text(), f"the file: {on_file.on_file_text()}")
    )
    setting.add(
        Row("flush_latency", _WRITTEN, disk.name, "KiB", column(results, _WRITTEN),
            [Target(_LIMIT, at_most=2)], over_nbd.text())
    )
    images.removed(folder)

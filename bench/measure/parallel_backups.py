"""Four concurrent first backups of four machines, against the same four in turn.

Half of each disk is the same on all of them. Wall times from the start of the first
command to the end of the last one; the images are in the page cache.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path
from typing import Callable

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import preread, settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.images import MIB
from bench.support.setting import Setting

SUMMARY = "four backups at once, against the same four in turn"

_MACHINES = 4
_TITLE = "first backups of four machines, at once"
_IN_TURN = "coldrise, in turn"


def measure(setting: Setting) -> None:
    folder = setting.folder("parallel")
    size = setting.sizes.disk_bytes // 2
    disks = [_build(folder / f"disk{number}.raw", size, number) for number in range(_MACHINES)]
    turn = 0
    stored: set[int] = set()

    def sample(store: Callable[[Coldrise, list[Path]], None]) -> dict[str, float]:
        nonlocal turn
        turn += 1
        coldrise = setting.new_coldrise(folder / f"repository{turn}")
        coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
        for disk in disks:
            preread(disk)
        settle(setting.work)
        started = time.monotonic()
        store(coldrise, disks)
        took_s = time.monotonic() - started
        stored.add(coldrise.call("stats")["chunks"])
        images.removed(coldrise.repository)
        return {_TITLE: took_s}

    contestants = {COLDRISE: lambda: sample(_at_once), _IN_TURN: lambda: sample(_in_turn)}
    results = setting.race("parallel_backups", contestants, setting.sizes.rounds)
    if len(stored) > 1:
        raise Failure(f"not the same was stored each time: {sorted(stored)} chunks")
    setting.add(
        Row("parallel_backups", _TITLE, f"4 x {size // MIB} MiB", "s", column(results, _TITLE),
            [Target(_IN_TURN, at_most=1.05)], "",
            "coldrise backup, four processes; half of each disk is the same on all of them")
    )
    images.removed(folder)


def _build(path: Path, size: int, number: int) -> Path:
    """Text and random extents; the first half is the same for every number."""
    with open(path, "wb") as stream:
        for seed in (1000, number):
            for extent in images.half_random_extents(size // 2, seed):
                stream.write(extent)
    return path


def _in_turn(coldrise: Coldrise, disks: list[Path]) -> None:
    for disk in disks:
        coldrise.call("backup", disk.stem, f"vda=raw:{disk}")


def _at_once(coldrise: Coldrise, disks: list[Path]) -> None:
    running = [
        subprocess.Popen(
            [str(word) for word in coldrise.command("backup", disk.stem, f"vda=raw:{disk}")],
            env={**os.environ, **coldrise.env}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for disk in disks
    ]
    for disk, process in zip(disks, running):
        _, messages = process.communicate()
        if process.returncode != 0:
            raise Failure(f"the backup of {disk.stem} ended with {process.returncode}: {messages}")

"""Writes into sixteen sessions at once over NBD, through one server and one fio job per
session. The peer is `nbdkit file` on a folder of fully written raw files. How they were
written matters: after calls of 1 MiB ext4 caches a file in large folios, which make writes
of 4 KiB slower, so both are measured. The limit is a plugin that only encrypts and writes
(bench/support/encrypting_file.c), on files written in small calls."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Callable

from bench.support import fio, images
from bench.support.commands import run, settle
from bench.support.encrypting import ENCRYPTING, encrypting_plugin, nbdkit_encrypting
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.servers import Server, nbdkit_folder
from bench.support.setting import Setting

SUMMARY = "random writes into sixteen sessions at once over NBD"

_SESSIONS = 16
_FILE = "nbdkit file"
_FILE_LARGE = "nbdkit file, files written in 1 MiB calls"
_NAMES = [f"many{number}" for number in range(_SESSIONS)]
_numbers = itertools.count(1)


def measure(setting: Setting) -> None:
    folder = setting.folder("many")
    disk = images.half_random(setting.store / "images", setting.sizes.sessions_disk_bytes)
    load = Load("randwrite", "4k", 4, disk.size_bytes, seconds=setting.sizes.seconds)
    steps = {
        # Every block exactly once, in random order.
        "random write 4K QD4, first touch": Load("randwrite", "4k", 4, disk.size_bytes, is_pass=True),
        "random write 4K QD4, rewrite": load.with_extra("--randseed=2"),
        "random read 4K QD4 of captured blocks": Load("randread", "4k", 4, disk.size_bytes, seconds=load.seconds),
    }

    if setting.program is not None:
        coldrise = setting.new_coldrise(folder / "repository")
        coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
        coldrise.call("backup", disk.name, f"vda=raw:{disk.path}")

    def figures(server: Server, exports: list[str]) -> dict[str, float]:
        sums = {}
        for title, step in steps.items():
            settle(setting.work)
            sums[title] = fio.over_many_nbd(step, [server.uri(export) for export in exports]).operations_per_s
        return sums

    def sessions() -> dict[str, float]:
        turn = next(_numbers)
        names = [f"{name}-{turn}" for name in _NAMES]
        for name in names:
            coldrise.publish(disk.name, name)
        with coldrise.serve(setting.socket("coldrise")) as server:
            sums = figures(server, [f"live/{name}/vda" for name in names])
        for name in names:
            coldrise.discard(name)
        return sums

    def on_files(call_bytes: int, server_of: Callable[[Path, Path], Server]) -> dict[str, float]:
        files = setting.folder("many/files")
        try:
            for name in _NAMES:
                run(["dd", f"if={disk.path}", f"of={files / name}", f"bs={call_bytes}", "status=none"])
            with server_of(files, setting.socket("nbdkit")) as server:
                return figures(server, _NAMES)
        finally:
            images.removed(files)

    contestants = {
        COLDRISE: sessions,
        _FILE: lambda: on_files(4 << 10, nbdkit_folder),
        _FILE_LARGE: lambda: on_files(1 << 20, nbdkit_folder),
    }
    plugin = encrypting_plugin(setting)
    if plugin is not None:
        contestants[ENCRYPTING] = lambda: on_files(4 << 10, functools.partial(nbdkit_encrypting, plugin))
    results = setting.race(f"{_SESSIONS} sessions", contestants, setting.sizes.rounds)
    subject = f"{_SESSIONS} x {disk.size_bytes // images.MIB} MiB"
    for title, step in steps.items():
        setting.add(
            Row("many_sessions", f"{title}, {_SESSIONS} sessions", subject, "IO/s", column(results, title),
                [Target(_FILE, at_least=1.0)], step.text(),
                "one such job for each session, the sum; coldrise serve nbd; nbdkit file dir=FOLDER")
        )
    images.removed(folder)

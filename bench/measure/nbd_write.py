"""Writes into a session over NBD, and reads of the captured blocks. The peers are
`nbdkit file` on a fully allocated and written raw file, and two servers that encrypt
as Coldrise does: nbdkit's luks filter, and qemu-nbd on LUKS. The limit is a plugin that only
encrypts and writes (bench/support/encrypting_file.c)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

from bench.support import fio, images
from bench.support.commands import settle
from bench.support.encrypting import ENCRYPTING, encrypting_plugin, nbdkit_encrypting
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.images import Disk
from bench.support.servers import Server, nbdkit_file, nbdkit_luks, qemu_nbd_luks
from bench.support.setting import Setting

SUMMARY = "random and sequential writes into a session over NBD"

_NBDKIT = "nbdkit file"
_NBDKIT_LUKS = "nbdkit file, luks filter"
_QEMU_LUKS = "qemu-nbd, LUKS"
_PASSPHRASE = "bench"
_PROCESSOR = ", processor time of the server for each"
_numbers = itertools.count(1)


@dataclass(frozen=True)
class _Step:
    title: str
    load: Load
    unit: str
    at_least: float
    """Of nbdkit file, which does not encrypt."""


def measure(setting: Setting) -> None:
    plugin = encrypting_plugin(setting)
    for disk in setting.disks():
        _measure_disk(setting, disk, plugin)


def _scenarios(setting: Setting, disk: Disk) -> list[list[_Step]]:
    """Each scenario begins with a new session and runs its steps in it in order."""
    window = {"size_bytes": disk.window_bytes, "offset_bytes": disk.window_offset_bytes}
    seconds = setting.sizes.seconds
    return [
        [
            # Every block exactly once, in random order.
            _Step("random write 4K QD16, first touch",
                  Load("randwrite", "4k", 16, **window, is_pass=True), "IO/s", 1.0),
            _Step("random write 4K QD16, rewrite",
                  Load("randwrite", "4k", 16, **window, seconds=seconds, extra=("--randseed=2",)), "IO/s", 1.0),
            _Step("random write 4K QD16, second rewrite",
                  Load("randwrite", "4k", 16, **window, seconds=seconds, extra=("--randseed=4",)), "IO/s", 1.0),
            _Step("random read 4K QD16 of captured blocks",
                  Load("randread", "4k", 16, **window, seconds=seconds), "IO/s", 0.85),
            _Step("random write 4K QD1, rewrite",
                  Load("randwrite", "4k", 1, **window, seconds=seconds, extra=("--randseed=3",)), "IO/s", 0.95),
        ],
        [
            _Step("random write 4K QD1, first touch",
                  Load("randwrite", "4k", 1, **window, seconds=seconds, is_pass=True), "IO/s", 0.95),
        ],
        [
            _Step("sequential write 256K QD4, first touch",
                  Load("write", "256k", 4, **window, is_pass=True), "MiB/s", 0.9),
            _Step("sequential write 256K QD4, rewrite",
                  Load("write", "256k", 4, **window, seconds=seconds), "MiB/s", 0.9),
        ],
    ]


def _measure_disk(setting: Setting, disk: Disk, plugin: Path | None) -> None:
    folder = setting.folder("raw")
    raw = images.full_copy(disk, folder / "disk.raw")
    luks = images.luks_copy(raw, folder / "disk.luks", _PASSPHRASE)
    for steps in _scenarios(setting, disk):
        contestants = {
            COLDRISE: lambda: _in_session(setting, disk, steps),
            _NBDKIT: lambda: _on(nbdkit_file(raw, setting.socket("nbdkit")), setting, steps),
            _NBDKIT_LUKS: lambda: _on(
                nbdkit_luks(luks, setting.socket("nbdkit"), _PASSPHRASE), setting, steps),
            _QEMU_LUKS: lambda: _on(
                qemu_nbd_luks(luks, setting.socket("qemu"), _PASSPHRASE), setting, steps),
        }
        if plugin is not None:
            contestants[ENCRYPTING] = lambda: _on(
                nbdkit_encrypting(plugin, raw, setting.socket("nbdkit")), setting, steps)
        results = setting.race(f"write, {disk.name}", contestants, setting.sizes.rounds)
        for step in steps:
            targets = [Target(_NBDKIT, at_least=step.at_least)]
            if step.load.pattern.endswith("write"):
                targets += [Target(peer, at_least=1.5) for peer in (_NBDKIT_LUKS, _QEMU_LUKS)]
            setting.add(
                Row("nbd_write", step.title, disk.name, step.unit, column(results, step.title),
                    targets, step.load.text())
            )
            if step.load.block == "4k":
                title = step.title + _PROCESSOR
                setting.add(
                    Row("nbd_write", title, disk.name, "µs", column(results, title), [], step.load.text())
                )
    images.removed(folder)


def _run(setting: Setting, server: Server, export: str, steps: list[_Step]) -> dict[str, float]:
    figures = {}
    for step in steps:
        settle(setting.work)
        before_s = server.processor_s()
        outcome = fio.over_nbd(step.load, server.uri(export))
        if step.load.block == "4k":
            used_s = server.processor_s() - before_s
            figures[step.title + _PROCESSOR] = used_s / outcome.operations * 1e6
        figures[step.title] = (
            outcome.operations_per_s if step.unit == "IO/s" else outcome.bytes_per_s / images.MIB
        )
    return figures


def _in_session(setting: Setting, disk: Disk, steps: list[_Step]) -> dict[str, float]:
    coldrise = setting.coldrise(disk)
    session = f"write{next(_numbers)}"
    coldrise.publish(disk.name, session)
    with coldrise.serve(setting.socket("coldrise")) as server:
        figures = _run(setting, server, f"live/{session}/vda", steps)
    coldrise.discard(session)
    return figures


def _on(peer: Server, setting: Setting, steps: list[_Step]) -> dict[str, float]:
    with peer as server:
        return _run(setting, server, "", steps)

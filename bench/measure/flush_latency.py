"""The time until a 4 KiB write is durable: write and flush through NBD into a
session, against pwrite and fdatasync on a raw file of the same file system."""

from __future__ import annotations

from bench.support import fio, images
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load, Outcome
from bench.support.servers import nbdkit_file
from bench.support.setting import Setting

SUMMARY = "latency of a 4 KiB write with its flush"

_FILE = "pwrite + fdatasync"
_NBDKIT = "nbdkit file"
_TITLE = "4K write + flush QD1"


def _latency_us(outcome: Outcome) -> float:
    """The time of a write and its flush; fio's own mean covers only the write."""
    return 1e6 / outcome.operations_per_s


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
            settle(setting.work)
            outcome = fio.over_nbd(over_nbd, server.uri(f"live/{name}/vda"))
        coldrise.discard(name)
        return {_TITLE: _latency_us(outcome)}

    def file() -> dict[str, float]:
        settle(setting.work)
        return {_TITLE: _latency_us(fio.on_file(on_file, raw))}

    def nbdkit() -> dict[str, float]:
        with nbdkit_file(raw, setting.socket("nbdkit")) as server:
            settle(setting.work)
            return {_TITLE: _latency_us(fio.over_nbd(over_nbd, server.uri()))}

    # A disk's sync times vary more than any other figure here: one more round.
    results = setting.race(
        _TITLE, {COLDRISE: session, _FILE: file, _NBDKIT: nbdkit}, setting.sizes.rounds + 1
    )
    setting.add(
        Row("flush_latency", _TITLE, disk.name, "µs", column(results, _TITLE),
            [Target(_FILE, at_most=1.2)], over_nbd.text(), f"the file: {on_file.on_file_text()}")
    )
    images.removed(folder)

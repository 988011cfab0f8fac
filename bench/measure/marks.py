"""Writes into a session that marks each second, against the same without marks."""

from __future__ import annotations

import itertools

from bench.support import fio
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.setting import Setting

SUMMARY = "writes into a session with and without time marks"

_PLAIN = "coldrise, --marks off"
_numbers = itertools.count(1)


def measure(setting: Setting) -> None:
    disk = setting.disks()[-1]
    window = {"size_bytes": disk.window_bytes, "offset_bytes": disk.window_offset_bytes}
    # Longer than elsewhere: the first seconds of a rewrite are those of the first marks.
    seconds = 3 * setting.sizes.seconds
    steps = {
        "random write 4K QD16, first touch": Load("randwrite", "4k", 16, **window, is_pass=True),
        "random write 4K QD16, rewrite":
            Load("randwrite", "4k", 16, **window, seconds=seconds, extra=("--randseed=2",)),
        "random write 4K QD16, second rewrite":
            Load("randwrite", "4k", 16, **window, seconds=seconds, extra=("--randseed=4",)),
        "4K write + flush QD1":
            Load("randwrite", "4k", 1, **window, seconds=setting.sizes.seconds, extra=("--fsync=1",)),
    }

    def session(rule: list[str]) -> dict[str, float]:
        coldrise = setting.coldrise(disk)
        name = f"marks{next(_numbers)}"
        coldrise.call("publish", f"{disk.name}/latest", "--name", name, *rule)
        figures = {}
        with coldrise.serve(setting.socket("coldrise")) as server:
            for title, load in steps.items():
                settle(setting.work)
                outcome = fio.over_nbd(load, server.uri(f"live/{name}/vda"))
                rate = outcome.operations_per_s
                figures[title] = 1e6 / rate if "flush" in title else rate
        coldrise.discard(name)
        return figures

    results = setting.race(f"marks, {disk.name}", {
        COLDRISE: lambda: session([]),
        _PLAIN: lambda: session(["--marks", "off"]),
    }, setting.sizes.rounds)
    for title, load in steps.items():
        is_flush = "flush" in title
        targets = [Target(_PLAIN, at_most=1.05) if is_flush else Target(_PLAIN, at_least=0.95)]
        unit = "µs" if is_flush else "IO/s"
        setting.add(Row("marks", title, disk.name, unit, column(results, title), targets, load.text()))

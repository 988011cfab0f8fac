"""Copies to another site over an emulated line, beside the disk as it is over one CUBIC connection: what a
replication without a store of its own sends. This is the measure of the storage makers' own papers: logical bytes by
time, packets on the line, and processor time by logical byte."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from bench.measure.line import one_connection
from bench.support.commands import run
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB, removed
from bench.support.machine import mhz
from bench.support.offsite import LONG, LOSSY, USUAL, Condition, Sites, part_of
from bench.support.postgres import database_disk
from bench.support.setting import Setting
from tests.support.line import Line

SUMMARY = "copies to another site over 45 Mbit/s with losses: cold, warm, 1 % changed, a database; packets, cycles"

_PEER = "the disk as it is, one CUBIC connection"
_COLD, _CHANGED = "cold", "1 % changed by 16 KiB writes"
_WARM, _WHOLE = "warm: the same data as another machine", "warm: the whole disk, brought on a drive as another machine"
_DATABASE, _DATABASE_LATER = "cold", "after more transactions"
_SPENT = "sent per changed byte, 1 % changed by 16 KiB writes"
_PACKETS = "packets on the line per MiB of the disk"
_CYCLES = "processor cycles per byte of the disk"
# The part of the guest's disk that is read cold: enough to fill the line for a quarter of a minute.
_COPIED_BYTES = 256 * MIB
_DATABASE_MIB = 512
_WRITE_BYTES = 16 << 10
# The share of content in packets of 1,500 bytes.
_CONTENT_SHARE = 1448 / 1500
# Of the paper's best run: 89 % of the packets were saved. And a third of what another paper's chain takes, 363 cycles.
_MOST_PACKETS, _MOST_CYCLES = 0.11, 121


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    for condition in (USUAL, LOSSY, LONG):
        _Condition(setting, condition).measure()


class _Condition:
    def __init__(self, setting: Setting, condition: Condition) -> None:
        self.setting, self.condition = setting, condition
        self.guest = setting.guest()
        self.copied_bytes = min(_COPIED_BYTES, setting.sizes.disk_bytes)
        self.has_database = condition is USUAL
        self.database = None
        if self.has_database:
            self.database = database_disk(setting.store / "images", 224 if setting.is_quick else _DATABASE_MIB)

    def measure(self) -> None:
        # The other lines show that losses and length do not matter.
        rounds = self.setting.sizes.few_rounds if self.has_database else 1
        results = self.setting.race("offsite", {COLDRISE: lambda: self._on_line(self._ours), _PEER: lambda: self._on_line(self._raw)}, rounds)
        subject = self.condition.text()
        part, whole = f"{self.copied_bytes // MIB} MiB of the guest's disk", f"{self.guest.path.stat().st_size // MIB} MiB"
        for kind, asked in ((_COLD, 9.41), (_WARM, None), (_WHOLE, 200.0), (_CHANGED, None)):
            note = f"{whole if kind == _WHOLE else part}; bytes of the disk by the time of the command"
            self._add(results, f"copy over a line, {kind}", kind, "Mbit/s of the disk",
                      [] if asked is None else [Target(_PEER, at_least=asked)], note)
        self._add(results, _SPENT, _SPENT, "bytes", [Target(at_most=1.0)], "random content; all that the source sent, with headers", False)
        for kind, asked in ((_COLD, _MOST_PACKETS), (_WARM, _MOST_PACKETS)):
            self._add(results, f"{_PACKETS}, {kind}", f"{_PACKETS}, {kind}", "packets", [Target(_PEER, at_most=asked)], f"both ways; {part}")
        for side in ("near", "far"):
            key = f"{_CYCLES}, {side}"
            self._add(results, f"{_CYCLES}, {_COLD}, {side} side", key, "cycles", [Target(at_most=_MOST_CYCLES)],
                      "seconds of the processor by its frequency; programs and system calls, not the network's own work", False)
        if self.database:
            note = f"PostgreSQL's data and log, {self.database.before.stat().st_size // MIB} MiB, {self.database.transactions} transactions"
            for kind, asked in ((_DATABASE, 9.41), (_DATABASE_LATER, None)):
                later = f"; {self.database.transactions // 4} more" if kind == _DATABASE_LATER else ""
                self._add(results, f"copy over a line, a database, {kind}", f"database, {kind}", "Mbit/s of the disk",
                          [] if asked is None else [Target(_PEER, at_least=asked)], note + later)
            self._add(results, f"{_PACKETS}, a database, {_DATABASE}", f"{_PACKETS}, database", "packets",
                      [Target(_PEER, at_most=_MOST_PACKETS)], note)
        self.setting.say(f"  offsite · {subject}: done")

    def _add(self, results, title: str, key: str, unit: str, targets: list[Target], note: str, with_peer: bool = True) -> None:
        samples = column(results, key)
        if not with_peer:
            samples = {COLDRISE: samples.get(COLDRISE, [])}
        self.setting.add(Row("offsite", title, self.condition.text(), unit, samples, targets, "", note))

    def _on_line(self, measured) -> dict[str, float]:
        folder = self.setting.folder("offsite")
        try:
            with contextlib.closing(self.condition.line(folder)) as line:
                return measured(line, folder)
        finally:
            removed(folder)

    def _raw(self, line: Line, _folder: Path) -> dict[str, float]:
        rate = one_connection(line, self.setting.sizes.seconds * 3)
        out, back = line.counters()
        packets = (out.packets + back.packets) / (out.bytes * _CONTENT_SHARE / MIB)
        rates = (_COLD, _WARM, _WHOLE, _CHANGED, f"database, {_DATABASE}", f"database, {_DATABASE_LATER}")
        counts = (f"{_PACKETS}, {_COLD}", f"{_PACKETS}, {_WARM}", f"{_PACKETS}, database")
        return {kind: rate for kind in rates} | {kind: packets for kind in counts}

    def _ours(self, line: Line, folder: Path) -> dict[str, float]:
        count, source = self.copied_bytes, self.guest.path
        image = part_of(source, folder / "disk.raw", self.guest.window_offset_bytes, count)
        figures: dict[str, float] = {}
        with Sites(self.setting.program, line, folder).paired() as sites:
            near, far = sites.near, sites.far

            def backed_up(machine: str, path: Path) -> None:
                near.call("backup", machine, f"vda=raw:{path}")

            def rate(size: int, elapsed_s: float) -> float:
                return size * 8 / elapsed_s / 1e6

            backed_up("web01", image)
            cold = sites.copied("web01")
            figures[_COLD] = rate(count, cold.elapsed_s)
            figures[f"{_PACKETS}, {_COLD}"] = cold.packets / (count / MIB)
            figures[f"{_CYCLES}, near"] = cold.near_cpu_s * mhz() * 1e6 / count
            figures[f"{_CYCLES}, far"] = cold.far_cpu_s * mhz() * 1e6 / count
            backed_up("web02", image)
            warm = sites.copied("web02")
            figures[_WARM] = rate(count, warm.elapsed_s)
            figures[f"{_PACKETS}, {_WARM}"] = warm.packets / (count / MIB)
            backed_up("web03", source)
            near.call("copy", "web03", "--to", far.repository, "--to-passphrase-file", far.env["COLDRISE_PASSPHRASE_FILE"])
            backed_up("web04", source)
            figures[_WHOLE] = rate(source.stat().st_size, sites.copied("web04").elapsed_s)
            writes = count // 100 // _WRITE_BYTES
            with open(image, "r+b") as made:
                for number in range(writes):
                    # Spread over the disk, each in a place of its own.
                    made.seek(number * 100 * _WRITE_BYTES)
                    made.write(os.urandom(_WRITE_BYTES))
            backed_up("web01", image)
            changed = sites.copied("web01")
            figures[_SPENT] = changed.out.bytes / (writes * _WRITE_BYTES)
            figures[_CHANGED] = rate(count, changed.elapsed_s)
            if self.database:
                # Under the same path, like a real disk.
                disk, size = folder / "database.raw", self.database.before.stat().st_size
                run(["cp", "--sparse=always", self.database.before, disk])
                backed_up("db01", disk)
                cold = sites.copied("db01")
                figures[f"database, {_DATABASE}"] = rate(size, cold.elapsed_s)
                figures[f"{_PACKETS}, database"] = cold.packets / (size / MIB)
                run(["cp", "--sparse=always", self.database.after, disk])
                backed_up("db01", disk)
                figures[f"database, {_DATABASE_LATER}"] = rate(size, sites.copied("db01").elapsed_s)
        return figures

"""The age of the newest complete time mark at another site, while a machine writes 5 MB/s over a slow line."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

from bench.support import fio
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.fio import Load
from bench.support.images import MIB, removed
from bench.support.offsite import USUAL, Sites
from bench.support.setting import Setting
from tests.support.line import Line

SUMMARY = "the age of the newest time mark at another site, 5 MB/s over 45 Mbit/s"

_MEDIAN, _TAIL = "age of the newest mark there, median", "age of the newest mark there, 99th percentile"
_SENT = "bytes on the line per byte written"
_DISK_BYTES = 1024 * MIB
_RATE_BYTES = 5_000_000
_STEP_S = 0.1
# The load, by how much of it can be compressed away.
_LOADS = {"half compressible": "--buffer_compress_percentage=50", "random bytes": "--refill_buffers"}


class _Sending:
    """A running protect-live: when each mark was there, and its time."""

    def __init__(self, sites: Sites) -> None:
        command = sites.line.near.command(*sites.near.command("protect-live", "live/trial", "--to", "far"))
        self.process = subprocess.Popen(command, env={**os.environ, **sites.near.env}, stdout=subprocess.PIPE, text=True)
        self.done: list[tuple[float, float]] = []
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self) -> None:
        for line in self.process.stdout:
            event = json.loads(line)
            if event.get("event") in ("connected", "sent"):
                self.done.append((time.time(), event["marked_at_ms"] / 1000))

    def wait(self) -> None:
        """Waits for the first mark there."""
        until = time.monotonic() + 60
        while not self.done:
            if time.monotonic() > until or self.process.poll() is not None:
                raise Failure("protect-live has sent nothing")
            time.sleep(0.1)

    def ages(self, start: float, end: float) -> list[float]:
        """Of the newest mark, at steps of a tenth of a second."""
        steps = [start + n * _STEP_S for n in range(int((end - start) / _STEP_S))]
        return sorted(step - max(mark for at, mark in self.done if at <= step) for step in steps)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait(timeout=60)
        self.thread.join()


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    for content, option in _LOADS.items():
        results = setting.race(f"protect_site, {content}", {COLDRISE: lambda: _round(setting, option)}, setting.sizes.few_rounds)
        subject = f"{USUAL.text()}; 5 MB/s, {content}"
        for title, unit, targets in ((_MEDIAN, "s", [Target(at_most=2.0)]), (_TAIL, "s", [Target(at_most=6.0)]), (_SENT, "bytes", [])):
            setting.add(Row("protect_site", title, subject, unit, column(results, title), targets, "protect-live live/S --to LINK",
                            "random writes of 64 KiB into a served session; seen at the source, when the mark is durable there"))


def _round(setting: Setting, option: str) -> dict[str, float]:
    folder = setting.folder("protect_site")
    try:
        with contextlib.closing(USUAL.line(folder)) as line:
            return _on_line(setting, line, folder, option)
    finally:
        removed(folder)


def _on_line(setting: Setting, line: Line, folder: Path, option: str) -> dict[str, float]:
    image = folder / "disk.raw"
    with open(image, "wb") as made:
        made.truncate(_DISK_BYTES)
    with Sites(setting.program, line, folder).paired() as sites:
        sites.near.call("backup", "web01", f"vda=raw:{image}")
        sites.near.call("publish", "web01/latest", "--name", "trial")
        seconds = 10 if setting.is_quick else 60
        load = Load("randwrite", "64k", 4, size_bytes=_DISK_BYTES, seconds=seconds, extra=(f"--rate={_RATE_BYTES}", option))
        warm = Load("randwrite", "64k", 1, size_bytes=_DISK_BYTES, seconds=3, extra=(f"--rate={_RATE_BYTES}", option))
        with sites.near.serve(setting.socket("coldrise")) as server:
            fio.over_nbd(warm, server.uri("live/trial/vda"))
            sending = _Sending(sites)
            try:
                sending.wait()
                before, start = line.counters(), time.time()
                outcome = fio.over_nbd(load, server.uri("live/trial/vda"))
                end, after = time.time(), line.counters()
            finally:
                sending.end()
        # The first seconds have the marks of before the load.
        ages = sending.ages(start + 3, end)
        written = outcome.operations_per_s * (64 << 10) * seconds
        return {_MEDIAN: ages[len(ages) // 2], _TAIL: ages[int(len(ages) * 0.99)],
                _SENT: (after[0].bytes - before[0].bytes) / written}

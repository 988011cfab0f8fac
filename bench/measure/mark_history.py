"""A session with much captured and a long history: what a publish at a mark takes, the space of the history, and the opening
after a kill."""

from __future__ import annotations

import threading
import time
from pathlib import Path

from bench.support import fio
from bench.support.coldrise import Coldrise
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.images import GIB, MIB, removed
from bench.support.setting import Setting

SUMMARY = "a publish at a mark of a session with much captured, and the space of the history"

_BLOCK_BYTES = 4096
_PUBLISH, _SPACE = "publish at a mark, mean of five", "space of the history per superseded byte"
_OPEN, _OPEN_QUARTER = "opening after a kill", "opening after a kill, a quarter captured"
_PUBLISHES = 5


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    captured = 64 * MIB if setting.is_quick else 10 * GIB
    writes = 2_000 if setting.is_quick else 86_400
    results = setting.race("mark_history", {COLDRISE: lambda: _round(setting, captured, writes)}, setting.sizes.few_rounds)
    subject = f"{captured // MIB:,} MiB captured, {writes:,} writes of 4 KiB of history"
    for title, unit, targets in (
        (_PUBLISH, "ms", [Target(at_most=100)]),
        (_SPACE, "bytes/byte", [Target(at_most=1.1)]),
        (_OPEN, "ms", []),
        (_OPEN_QUARTER, "ms", []),
    ):
        setting.add(Row("mark_history", title, subject, unit, column(results, title), targets, "publish live/S@TIME"))


def _round(setting: Setting, captured: int, writes: int) -> dict[str, float]:
    folder = setting.folder("mark_history")
    try:
        image = folder / "disk.raw"
        with open(image, "wb") as made:
            made.truncate(captured)
        coldrise = setting.new_coldrise(folder / "repository")
        coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
        coldrise.call("backup", "web01", f"vda=raw:{image}")
        figures = {}
        for name, part in (("quarter", 4), ("whole", 1)):
            coldrise.publish("web01", name)
            _fill(setting, coldrise, name, captured // part)
            figures[name] = _opening_ms(setting, coldrise, name)
        coldrise.discard("quarter")
        space, publish_ms = _history(setting, coldrise, captured, writes)
        return {_PUBLISH: publish_ms, _SPACE: space, _OPEN: figures["whole"], _OPEN_QUARTER: figures["quarter"]}
    finally:
        removed(folder)


def _fill(setting: Setting, coldrise: Coldrise, name: str, size: int) -> None:
    """Writes the first `size` bytes, and kills the server."""
    with coldrise.serve(setting.socket("coldrise")) as server:
        load = Load("write", "1m", 4, size_bytes=size, is_pass=True, extra=("--refill_buffers", "--end_fsync=1"))
        fio.over_nbd(load, server.uri(f"live/{name}/vda"))
        server.kill()
    settle(setting.work)


def _opening_ms(setting: Setting, coldrise: Coldrise, name: str) -> float:
    """From the first request on: the session is opened with it."""
    with coldrise.serve(setting.socket("coldrise")) as server:
        began = time.monotonic()
        fio.over_nbd(Load("read", "4k", 1, size_bytes=_BLOCK_BYTES, is_pass=True), server.uri(f"live/{name}/vda"))
        return (time.monotonic() - began) * 1000


def _used(folder: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in folder.rglob("*") if path.is_file())


def _history(setting: Setting, coldrise: Coldrise, captured: int, writes: int) -> tuple[float, float]:
    """Space per superseded byte, and the mean time of a publish at a mark in milliseconds, while the session is served."""
    layers = coldrise.repository / "layers"
    seconds = 5 if setting.is_quick else 60
    with coldrise.serve(setting.socket("coldrise")) as server:
        rate = writes // seconds
        load = Load("randwrite", "4k", 4, size_bytes=captured, seconds=seconds, extra=(f"--rate_iops={rate}", "--end_fsync=1"))
        # One write first: the session is open, and its present blocks belong to a mark.
        fio.over_nbd(Load("write", "4k", 1, size_bytes=_BLOCK_BYTES, is_pass=True), server.uri("live/whole/vda"))
        while not coldrise.call("marks", "whole")["marks"]:
            time.sleep(0.1)
        before = _used(layers)
        outcome = fio.over_nbd(load, server.uri("live/whole/vda"))
        superseded = outcome.operations * _BLOCK_BYTES
        space = (_used(layers) - before) / superseded
        # As of a machine that runs: a client is connected.
        slow = Load("randwrite", "4k", 1, size_bytes=captured, seconds=20, extra=("--rate_iops=20",))
        client = threading.Thread(target=fio.over_nbd, args=(slow, server.uri("live/whole/vda")))
        client.start()
        while coldrise.call("marks", "whole")["held_bytes"] is None:
            time.sleep(0.1)
        marks = coldrise.call("marks", "whole")["marks"]
        took = []
        for number, mark in enumerate(marks[1 :: max(1, len(marks) // _PUBLISHES)][:_PUBLISHES]):
            took.append(coldrise.call_timed("publish", mark["address"], "--name", f"back{number}") * 1000)
        client.join()
    return space, sum(took) / len(took)

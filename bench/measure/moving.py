"""Moves the disk of a machine that runs on a session to a new qcow2 file, beside `qemu-img convert` of the
same export. The machine is a QEMU without a guest; requests through its block layer stand for the guest's."""

from __future__ import annotations

import random
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import run, settle, timed
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.servers import nbd_uri
from bench.support.setting import Setting

SUMMARY = "move of a running machine's disk, and its requests meanwhile"

_CONVERT = "qemu-img convert"
_BEFORE = "without a move"
_MOVE = "move of an idle machine's disk, the whole command"
_REQUESTS = "requests of the machine during a move"
_MACHINE = "moving"


def measure(setting: Setting) -> None:
    folder = setting.folder("moving")
    disk = images.half_random(setting.store / "images", setting.sizes.captured_bytes)
    coldrise = None
    if setting.program is not None:
        coldrise = setting.new_coldrise(folder / "repository")
        coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
        coldrise.call("backup", _MACHINE, f"vda=raw:{disk.path}")
        settle(setting.work)
        coldrise.preread()
    target = folder / "target.qcow2"
    megabytes = disk.size_bytes / images.MIB

    def moved() -> dict[str, float]:
        with _machine(setting, coldrise) as (machine, _):
            return {_MOVE: megabytes / _move(coldrise, machine, target)}

    def converted() -> dict[str, float]:
        with _machine(setting, coldrise) as (_, uri):
            target.unlink(missing_ok=True)
            words = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", uri, target]
            return {_MOVE: megabytes / timed(words)}

    def requests(is_moving: bool) -> dict[str, float]:
        with _machine(setting, coldrise) as (machine, _), _load(machine, disk.size_bytes) as load:
            began, before = time.monotonic(), load.done
            if is_moving:
                _move(coldrise, machine, target)
            else:
                time.sleep(setting.sizes.seconds)
            return {_REQUESTS: (load.done - before) / (time.monotonic() - began)}

    rounds = setting.sizes.rounds
    if coldrise is None:
        setting.race(_MOVE, {COLDRISE: dict}, 0)
        return
    results = setting.race(_MOVE, {COLDRISE: moved, _CONVERT: converted}, rounds)
    setting.add(Row("moving", _MOVE, disk.name, "MiB/s", column(results, _MOVE), [Target(_CONVERT, at_least=0.9)],
                    "coldrise move live/SESSION vda=FILE.qcow2", "MiB of the disk; half of it is data"))
    both = {COLDRISE: lambda: requests(True), _BEFORE: lambda: requests(False)}
    results = setting.race(_REQUESTS, both, rounds)
    setting.add(Row("moving", _REQUESTS, disk.name, "requests/s", column(results, _REQUESTS),
                    [Target(_BEFORE, at_least=0.7)], "",
                    "4 KiB at random, one at a time, half of them writes; without --rate"))
    images.removed(folder)


@contextmanager
def _machine(setting: Setting, coldrise: Coldrise) -> Iterator[tuple]:
    """A machine on a new session, and the session's URI."""
    # Needs libnbd for Python, as the tests do.
    from tests.support.running_machine import Machine

    coldrise.publish(_MACHINE, "moving")
    socket = setting.socket("coldrise")
    # Short: addresses of sockets are.
    folder = Path(tempfile.mkdtemp(prefix="move-", dir="/tmp"))
    try:
        with coldrise.serve(socket), Machine(folder / "qemu", socket, {"vda": "live/moving/vda"}) as machine:
            yield machine, nbd_uri(socket, "live/moving/vda")
    finally:
        shutil.rmtree(folder)
        coldrise.discard("moving")


def _move(coldrise: Coldrise, machine, target: Path) -> float:
    target.unlink(missing_ok=True)
    settle(target.parent)
    words = coldrise.command("move", "live/moving", f"vda={target}", "--qmp", machine.qmp)
    began = time.monotonic()
    run(words, env=coldrise.env)
    return time.monotonic() - began


class _Load:
    """Random requests of 4 KiB, one at a time."""

    def __init__(self, machine, size_bytes: int) -> None:
        self.done = 0
        self.is_ending = False
        self._disk = machine.disk("vda")
        self._size_bytes = size_bytes
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        places = random.Random(1)
        while not self.is_ending:
            offset = places.randrange(self._size_bytes // 4096) * 4096
            if places.random() < 0.5:
                self._disk.pwrite(b"x" * 4096, offset)
            else:
                self._disk.pread(4096, offset)
            self.done += 1


@contextmanager
def _load(machine, size_bytes: int) -> Iterator[_Load]:
    load = _Load(machine, size_bytes)
    try:
        yield load
    finally:
        load.is_ending = True
        load.thread.join(60)

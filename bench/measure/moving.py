"""Moves the disk of a machine that runs on a session to a new qcow2 file, beside `qemu-img convert` of the same
export. The machine is a QEMU whose processors are stopped; requests through its virtio disk replace the guest's."""

from __future__ import annotations

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
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.servers import nbd_uri
from bench.support.setting import Setting
from bench.support.virtio_disk import VirtioDisk

SUMMARY = "move of a running machine's disk, and its requests meanwhile"

# By default qemu-img ends with the image in the page cache.
_CONVERTS = {"qemu-img convert": [], "qemu-img convert -t none, on the disk at its end": ["-t", "none"]}
_BEFORE = "without a move"
_MOVE = "move of an idle machine's disk, the whole command"
_REQUESTS = "requests of the machine during a move"
_COPY = "the copy of that move"
_MACHINE = "moving"


def measure(setting: Setting) -> None:
    folder = setting.folder("moving")
    disk = images.half_random(setting.store / "images", setting.sizes.captured_bytes)
    if setting.program is None:
        return
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

    def convert(options: list[str]):
        def converted() -> dict[str, float]:
            with _machine(setting, coldrise) as (_, uri):
                target.unlink(missing_ok=True)
                settle(setting.work)
                words = ["qemu-img", "convert", "-f", "raw", "-O", "qcow2", *options, uri, target]
                return {_MOVE: megabytes / timed(words)}

        return converted

    def requests(is_moving: bool) -> dict[str, float]:
        with _machine(setting, coldrise) as (machine, _), _load(machine, disk.size_bytes) as load:
            time.sleep(1)
            began, before = time.monotonic(), load.done
            if is_moving:
                _move(coldrise, machine, target)
            else:
                time.sleep(setting.sizes.seconds)
            took = time.monotonic() - began
            figures = {_REQUESTS: (load.done - before) / took}
            return {**figures, _COPY: megabytes / took} if is_moving else figures

    rounds = setting.sizes.rounds
    contestants = {COLDRISE: moved, **{name: convert(options) for name, options in _CONVERTS.items()}}
    results = setting.race(_MOVE, contestants, rounds)
    setting.add(Row("moving", _MOVE, disk.name, "MiB/s", column(results, _MOVE),
                    [Target(name, at_least=0.9) for name in _CONVERTS],
                    "coldrise move live/SESSION vda=FILE.qcow2", "all of the disk is data"))
    both = {COLDRISE: lambda: requests(True), _BEFORE: lambda: requests(False)}
    results = setting.race(_REQUESTS, both, rounds)
    setting.add(Row("moving", _REQUESTS, disk.name, "requests/s", column(results, _REQUESTS),
                    [Target(_BEFORE, at_least=0.7)], "",
                    "4 KiB at random, one at a time, half of them writes; without --rate"))
    setting.add(Row("moving", _COPY, disk.name, "MiB/s", column(results, _COPY), [], "", "the whole command"))
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
    options = ["-qtest", f"unix:{folder}/qtest,server=on,wait=off", "-qtest-log", "none"]
    try:
        with coldrise.serve(socket), Machine(
            folder / "qemu", socket, {"vda": "live/moving/vda"}, options=options
        ) as machine:
            machine.qtest = folder / "qtest"
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
    """Random requests of the machine, one at a time."""

    def __init__(self, machine, size_bytes: int) -> None:
        self.done = 0
        self.is_ending = False
        self.error: Exception | None = None
        self._disk = VirtioDisk(machine.qtest, size_bytes)
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        try:
            while not self.is_ending:
                self._disk.request()
                self.done += 1
        except (Failure, OSError) as error:
            self.error = error


@contextmanager
def _load(machine, size_bytes: int) -> Iterator[_Load]:
    load = _Load(machine, size_bytes)
    try:
        yield load
    finally:
        load.is_ending = True
        load.thread.join(60)
    if load.error is not None:
        raise Failure(f"the machine's requests: {load.error}")

"""How the time of each operation grows with the number of restore points, machines, sealed points and sessions.
Processor time (user and system) of the commands, so that long runs may share the machine; files are in memory."""

from __future__ import annotations

import math
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Callable

from bench.support import nfs
from bench.support.coldrise import Coldrise
from bench.support.commands import run, spell
from bench.support.figures import COLDRISE, Failure, Row, Target
from bench.support.nbd import Connection
from bench.support.servers import Server
from bench.support.setting import Setting
from tests.support.service import Coldrised

SUMMARY = "processor time of each operation by number of points, machines, sealed points and sessions"

# Of the time between two sizes, for operations on the whole repository: n log n between 1,000 and 10,000 is 1.125.
_WHOLE = 1.15
# Of the time that one more point adds to an operation on one point.
_STEP_US = 20.0
_MACHINE = "m"
_CHUNK = 16 << 10
_DISK = 64 * _CHUNK
_ROUNDS = 3


class _Subject:
    """A repository with many points, and the newest machine's disk."""

    def __init__(self, setting: Setting, place: Path) -> None:
        self.setting, self.place = setting, place
        self.disk = place / "disk.raw"
        self.disk.write_bytes(b"coldrise" * (_DISK // 8))
        self.coldrise = setting.new_coldrise(place / "repository")
        # The example opens no other.
        self.coldrise.env.pop("COLDRISE_PASSPHRASE_FILE")
        self.coldrise.call("init", "--no-encryption")
        self.coldrise.call("backup", _MACHINE, f"vda=raw:{self.disk}")
        self.turn = 0

    def cpu_s(self, *words: object) -> float:
        """Processor time of a command and of the processes that it waited for."""
        process = subprocess.Popen(
            [str(word) for word in self.coldrise.command(*words)],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env={**os.environ, **self.coldrise.env},
        )
        errors = process.stderr.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise Failure(f"{spell(words)}: exit {process.returncode}: {errors[-300:]!r}")
        return usage.ru_utime + usage.ru_stime

    def change(self) -> None:
        """Makes one chunk of the disk a new one."""
        self.turn += 1
        with open(self.disk, "r+b") as disk:
            disk.seek(self.turn % (_DISK // _CHUNK) * _CHUNK)
            disk.write(os.urandom(_CHUNK))


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    os.environ["COLDRISE_BUILD_DIR"] = str(Path(setting.program).parent)
    run(["cargo", "build", "--release", "--locked", "-p", "coldrise-store", "--example", "many_points"])
    sizes = [10, 20] if setting.is_quick else setting.points
    figures: dict[tuple[str, str], dict[int, float]] = {}
    for shape, (make, operations) in _SHAPES.items():
        for size in sizes:
            with tempfile.TemporaryDirectory(prefix="coldrise-growth-", dir="/dev/shm") as place:
                subject = _Subject(setting, Path(place))
                for what, value in {**make(subject, size), **_operate(subject, operations)}.items():
                    figures.setdefault((shape, what), {})[size] = value
                    setting.say(f"  {shape} {size} · {what}: {value * 1000:,.1f} ms")
    for (shape, what), times in figures.items():
        _add(setting, shape, what, times)


def _add(setting: Setting, shape: str, what: str, times: dict[int, float]) -> None:
    for size, value in times.items():
        setting.add(Row("growth", what, f"{size:,} {shape}", "ms", {COLDRISE: [value * 1000]}))
    for (few, less), (many, more) in zip(times.items(), list(times.items())[1:]):
        span = f"{few:,} to {many:,} {shape}"
        step_us = (more - less) / (many - few) * 1e6
        if what in _ONE_POINT:
            target = Target(at_most=_STEP_US)
            setting.add(Row("growth", f"{what}, by one more", span, "µs", {COLDRISE: [step_us]}, [target]))
        else:
            exponent = math.log(more / less) / math.log(many / few)
            setting.add(Row("growth", f"{what}, exponent", span, "", {COLDRISE: [exponent]}, [Target(at_most=_WHOLE)]))


def _operate(subject: _Subject, operations: list[str]) -> dict[str, float]:
    taken = {}
    for what in operations:
        try:
            rounds = range(1 if what in _ONCE else _ROUNDS)
            taken[what] = statistics.median(_OPERATIONS[what](subject) for _ in rounds)
        except Failure as error:
            subject.setting.failures.append(f"growth: {what}: {error}")
            subject.setting.say(f"  {what} FAILED: {error}")
    return taken


def _many_points(subject: _Subject, points: int, machines: int) -> None:
    example = Path(subject.coldrise.program).parent / "examples" / "many_points"
    run([example, subject.coldrise.repository, _MACHINE, points, machines, "changed"])
    # The example is one process: its log and its list of files grow with the points.
    subject.coldrise.call("gc")


def _points(subject: _Subject, size: int) -> dict[str, float]:
    _many_points(subject, size - 1, 0)
    return {}


def _machines(subject: _Subject, size: int) -> dict[str, float]:
    _many_points(subject, 1, size - 1)
    return {}


def _sessions(subject: _Subject, size: int) -> dict[str, float]:
    taken = [subject.cpu_s("publish", f"{_MACHINE}/latest", "--name", f"s{number}") for number in range(size)]
    return {"publish": statistics.median(taken[-_ROUNDS:])}


def _sealed(subject: _Subject, size: int) -> dict[str, float]:
    """Points of a served session, with one written block each. None is folded."""
    subject.coldrise.publish(_MACHINE, "s")
    taken = []
    with subject.coldrise.serve(subject.setting.socket("growth")) as server:
        with Connection(server.socket_path, "live/s/vda") as connection:
            for number in range(size):
                connection.write(number * 4096 % _DISK, os.urandom(4096))
                connection.flush()
                began = server.processor_s()
                taken.append(subject.cpu_s("seal", "s") + server.processor_s() - began)
    return {"seal": statistics.mean(taken[-64:]), "all seals": sum(taken)}


def _backup(subject: _Subject) -> float:
    subject.change()
    return subject.cpu_s("backup", _MACHINE, f"vda=raw:{subject.disk}")


def _publish(subject: _Subject) -> float:
    subject.turn += 1
    return subject.cpu_s("publish", f"{_MACHINE}/latest", "--name", f"p{subject.turn}")


def _unpublish(subject: _Subject) -> float:
    return subject.cpu_s("unpublish", f"p{subject.turn}", "--discard")


def _seal_one(subject: _Subject) -> float:
    """A seal of a session that nothing serves and nothing was written to."""
    _publish(subject)
    taken = subject.cpu_s("seal", f"p{subject.turn}")
    _unpublish(subject)
    return taken


def _forget(subject: _Subject) -> float:
    _backup(subject)
    return subject.cpu_s("forget", f"{_MACHINE}/latest")


def _publish_one(subject: _Subject) -> float:
    taken = _publish(subject)
    _unpublish(subject)
    return taken


def _unpublish_one(subject: _Subject) -> float:
    _publish(subject)
    return _unpublish(subject)


def _copy_all(subject: _Subject) -> float:
    other = Coldrise(subject.coldrise.program, subject.place / "copy")
    other.env.pop("COLDRISE_PASSPHRASE_FILE")
    if not other.repository.exists():
        other.call("init", "--no-encryption")
    return subject.cpu_s("copy", "--to", other.repository, "--all")


def _copy_one(subject: _Subject) -> float:
    """After `_copy_all`: one new point, to a repository that has all others."""
    _backup(subject)
    return subject.cpu_s("copy", "--to", subject.place / "copy", _MACHINE)


def _service(subject: _Subject, change: bool) -> float:
    """Processor time of the service until it lists all points, or from then until it lists one more."""
    with tempfile.TemporaryDirectory(dir=subject.place) as place:
        with Coldrised(place, subject.coldrise.repository) as service:
            count = _listed(service, 1)
            began = 0.0
            if change:
                time.sleep(1)
                began = _cpu_of(service.process.pid)
                _backup(subject)
                _listed(service, count + 1)
            return _cpu_of(service.process.pid) - began


def _listed(service: Coldrised, least: int) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        answer = service.call("GET", f"machines/{_MACHINE}")
        if answer.status == 200 and answer.json["points"] >= least:
            return answer.json["points"]
        time.sleep(0.1)
    raise Failure("the service does not list the points")


def _mounted(subject: _Subject) -> float:
    folder = subject.place / "mounted"
    folder.mkdir(exist_ok=True)
    command = [subject.setting.program, "mount", folder]
    with Server(command, subject.setting.socket("mount"), env=subject.coldrise.env, wait_for_line="mounted") as server:
        run(["sh", "-c", 'ls -l "$1" "$1/$2" | wc -l', "sh", folder, _MACHINE])
        return _cpu_of(server.pid)


def _over_nfs(subject: _Subject) -> float:
    with nfs.coldrise_nfs(subject.setting, subject.coldrise) as server:
        began = server.processor_s()
        with server.connect() as client:
            root = server.root()
            client.list_plus(root)
            client.list_plus(client.lookup(root, _MACHINE))
        return _cpu_of(server.pid) - began


_OPERATIONS: dict[str, Callable[[_Subject], float]] = {
    "list": lambda subject: subject.cpu_s("list"),
    "list of one machine": lambda subject: subject.cpu_s("list", _MACHINE),
    "sessions": lambda subject: subject.cpu_s("sessions"),
    "stats": lambda subject: subject.cpu_s("stats"),
    "doctor": lambda subject: subject.cpu_s("doctor"),
    "copies": lambda subject: subject.cpu_s("copies"),
    "verify": lambda subject: subject.cpu_s("verify"),
    "prune": lambda subject: subject.cpu_s("prune", "--keep-last", "1000000", "--dry-run"),
    "prune of all but 10": lambda subject: subject.cpu_s("prune", "--keep-last", "10"),
    "gc": lambda subject: subject.cpu_s("gc"),
    "repair": lambda subject: subject.cpu_s("repair"),
    "fold": lambda subject: subject.cpu_s("fold"),
    "service starts": lambda subject: _service(subject, change=False),
    "mount and ls": _mounted,
    "list over NFS": _over_nfs,
    "copy of all": _copy_all,
    "copy of one point": _copy_one,
    "service, one more point": lambda subject: _service(subject, change=True),
    "backup": _backup,
    "forget": _forget,
    "publish": _publish_one,
    "seal": _seal_one,
    "unpublish": _unpublish_one,
}
_ONE_POINT = {"copy of one point", "service, one more point", "backup", "forget", "publish", "seal", "unpublish"}
_ONCE = {"prune of all but 10", "fold", "copy of all", "repair"}
_READ = ["list", "list of one machine", "sessions", "stats", "doctor", "copies", "verify", "prune", "service starts",
         "mount and ls", "list over NFS"]
_WRITE = ["backup", "publish", "unpublish", "forget", "service, one more point", "gc"]
_SHAPES: dict[str, tuple[Callable[[_Subject, int], dict[str, float]], list[str]]] = {
    "points": (_points, [*_READ, *_WRITE, "seal", "copy of all", "copy of one point", "repair", "prune of all but 10"]),
    "machines": (_machines, [*_READ, *_WRITE, "seal", "copy of all", "copy of one point", "repair"]),
    "sealed points": (_sealed, [*_READ, *_WRITE, "copy of all", "copy of one point", "fold"]),
    "sessions": (_sessions, [*_READ, *_WRITE, "seal"]),
}

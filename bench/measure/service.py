"""The service: what it adds to a backup, how soon a client learns of its end, the list of a large site, and the
memory of a service that has nothing to do."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import preread, run, settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.images import MIB
from bench.support.setting import Setting
from tests.support.service import Coldrised

SUMMARY = "backups through the service, events, a list of 100,000 points, idle memory"

_BACKUP = "backup through the service"
_EVENT = "end of a run to its event at a client"
_LIST = "list of all points over the API"
_MACHINES_LIST = "list of all machines over the API"
_MEMORY_SMALL = "memory of the idle service, 2 machines"
_MEMORY_LARGE = "memory of the idle service, 100,000 points"
_COMMAND = "coldrise backup"
_MACHINES, _POINTS = 1000, 100


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    os.environ["COLDRISE_BUILD_DIR"] = str(Path(setting.program).parent)
    folder = setting.folder("service")
    disk = images.half_random(folder, setting.sizes.disk_bytes).path
    _backups(setting, folder, disk)
    _large_site(setting)
    images.removed(folder)


def _backups(setting: Setting, folder: Path, disk: Path) -> None:
    turn = 0

    def repository() -> Coldrise:
        nonlocal turn
        turn += 1
        coldrise = setting.new_coldrise(folder / f"repository{turn}")
        coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
        preread(disk)
        settle(setting.work)
        return coldrise

    def by_command() -> dict[str, float]:
        coldrise = repository()
        started = time.monotonic()
        coldrise.call("backup", "web01", f"vda=raw:{disk}")
        took_s = time.monotonic() - started
        images.removed(coldrise.repository)
        return {_BACKUP: took_s}

    def by_service() -> dict[str, float]:
        coldrise = repository()
        with tempfile.TemporaryDirectory(dir=folder) as place:
            with _service(place, coldrise) as service:
                events = _Events(service)
                body = {"kind": "backup", "machine": "web01", "disks": {"vda": f"raw:{disk}"}}
                started = time.monotonic()
                wanted = service.post("runs", body)["run"]
                arrived, arrived_ms = events.end_of(wanted)
                ended = service.get(f"runs/{wanted}")
                if ended["state"] != "ok":
                    raise Failure(f"the backup through the service failed: {ended}")
                memory = _memory_mib(service)
        images.removed(coldrise.repository)
        return {_BACKUP: arrived - started, _EVENT: arrived_ms - ended["result"]["ended_at_ms"], _MEMORY_SMALL: memory}

    results = setting.race("service", {COLDRISE: by_service, _COMMAND: by_command}, setting.sizes.rounds)
    size = f"{setting.sizes.disk_bytes // MIB} MiB"
    setting.add(Row("service", _BACKUP, size, "s", column(results, _BACKUP), [Target(_COMMAND, at_most=1.03)], "",
                    "from the request to the event of its end; first backup, half-random content"))
    setting.add(Row("service", _EVENT, "one client", "ms", column(results, _EVENT), [Target(at_most=200)], "", ""))
    setting.add(Row("service", _MEMORY_SMALL, "RSS", "MiB", column(results, _MEMORY_SMALL), [Target(at_most=80)], "",
                    "after one backup and one client"))


def _large_site(setting: Setting) -> None:
    run(["cargo", "build", "--release", "--locked", "-p", "coldrise-store", "--example", "many_points"])
    place = Path(tempfile.mkdtemp(prefix="coldrise-bench-", dir="/dev/shm"))
    try:
        image = place / "disk.raw"
        image.write_bytes(b"coldrise" * (1 << 17))
        coldrise = setting.new_coldrise(place / "repository")
        coldrise.env.pop("COLDRISE_PASSPHRASE_FILE")
        coldrise.call("init", "--no-encryption")
        coldrise.call("backup", "site", f"vda=raw:{image}")
        example = Path(setting.program).parent / "examples" / "many_points"
        run([example, coldrise.repository, "site", _POINTS - 1, _MACHINES - 1])

        with _service(place, coldrise) as service:
            _wait_for_machines(service, _MACHINES)

            def sample() -> dict[str, float]:
                return {_LIST: _get_ms(service, "points"), _MACHINES_LIST: _get_ms(service, "machines"),
                        _MEMORY_LARGE: _memory_mib(service)}

            results = setting.race("service list", {COLDRISE: sample}, setting.sizes.few_rounds)
        size = f"{_MACHINES} x {_POINTS} points"
        for title in (_LIST, _MACHINES_LIST):
            setting.add(Row("service", title, size, "ms", column(results, title), [Target(at_most=300)], "",
                            "over the Unix socket, read whole, not parsed"))
        setting.add(Row("service", _MEMORY_LARGE, "RSS", "MiB", column(results, _MEMORY_LARGE), [Target(at_most=80)], "",
                        "after lists of all points"))
    finally:
        shutil.rmtree(place)


def _service(place, coldrise: Coldrise) -> Coldrised:
    return Coldrised(place, coldrise.repository, coldrise.env.get("COLDRISE_PASSPHRASE_FILE"))


class _Events:
    """The times at which events of ended runs arrive."""

    def __init__(self, service: Coldrised):
        self.ended: dict[str, tuple[float, float]] = {}
        self.changed = threading.Condition()
        self.connection = service.connection(timeout_s=600)
        self.connection.request("GET", "/api/v1/events")
        self.response = self.connection.getresponse()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for line in self.response:
                if not line.startswith(b'data: {"'):
                    continue
                event, now = json.loads(line[6:]), (time.monotonic(), time.time() * 1000)
                if event["type"] == "run" and event["state"] not in ("running", "planned"):
                    with self.changed:
                        self.ended.setdefault(event["id"], now)
                        self.changed.notify_all()
        except (OSError, ValueError):
            pass

    def end_of(self, wanted: str) -> tuple[float, float]:
        with self.changed:
            if not self.changed.wait_for(lambda: wanted in self.ended, timeout=600):
                raise Failure(f"no event of the end of run {wanted}")
            return self.ended[wanted]


def _get_ms(service: Coldrised, path: str) -> float:
    started = time.monotonic()
    answer = service.call("GET", path)
    took_ms = (time.monotonic() - started) * 1000
    if answer.status != 200:
        raise Failure(f"GET {path} answered {answer.status}")
    return took_ms


def _wait_for_machines(service: Coldrised, count: int) -> None:
    deadline = time.monotonic() + 120
    while True:
        answer = service.call("GET", "machines")
        if answer.status == 200 and len(answer.json) == count:
            return
        if time.monotonic() > deadline:
            raise Failure(f"the service does not list {count} machines: {answer.status}")
        time.sleep(0.2)


def _memory_mib(service: Coldrised) -> float:
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) / 1024

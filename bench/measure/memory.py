"""Memory of the serving process during and after every kind of load, against the
configured cache and 64 MiB."""

from __future__ import annotations

import threading
from pathlib import Path

from bench.support import fio, images
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.fio import Load
from bench.support.images import MIB
from bench.support.servers import Server, nbdkit_file
from bench.support.setting import Setting

SUMMARY = "memory of the serving process after all loads"

_ALLOWANCE_MIB = 64
_NBDKIT = "nbdkit file"
_SAMPLE_EVERY_S = 0.1
_PEAK = "memory of the server, highest (RssAnon + RssShmem)"
_AFTER = "memory of the server, after all loads (RssAnon + RssShmem)"
_RESIDENT = "all resident pages after all loads (VmRSS)"
_FILE_PAGES = "of these, pages of files (RssFile)"


def _tree(pid: int) -> list[int]:
    """A process and all its descendants."""
    pids = [pid]
    for parent in pids:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                pids += [int(word) for word in children.read_text().split()]
            except OSError:
                # Threads may end meanwhile.
                continue
    return pids


def _status_kib(pid: int) -> dict[str, int]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines)
    return {key: int(value.split()[0]) for key, value in pairs if key.startswith(("Rss", "VmRSS"))}


def memory_mib(pid: int) -> dict[str, float]:
    """RssAnon, RssFile, RssShmem and VmRSS of a process and its children, in MiB."""
    total: dict[str, float] = {}
    for member in _tree(pid):
        try:
            status = _status_kib(member)
        except FileNotFoundError:
            continue
        for key, kib in status.items():
            total[key] = total.get(key, 0) + kib / 1024
    if not total:
        raise Failure(f"process {pid} is gone")
    return total


class _PeakWatch(threading.Thread):
    """Records the highest private memory while the loads run."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._done = threading.Event()
        self.peak_mib = 0.0

    def run(self) -> None:
        while not self._done.wait(_SAMPLE_EVERY_S):
            try:
                seen = memory_mib(self._pid)
            except (Failure, OSError):
                return
            self.peak_mib = max(self.peak_mib, seen["RssAnon"] + seen["RssShmem"])

    def __enter__(self) -> "_PeakWatch":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self.join()


def _session_loads(setting: Setting, size_bytes: int) -> list[Load]:
    seconds = setting.sizes.seconds
    return [
        Load("randwrite", "4k", 16, size_bytes, is_pass=True),
        Load("randwrite", "4k", 16, size_bytes, seconds=seconds),
        Load("write", "256k", 4, size_bytes, seconds=seconds),
        Load("randread", "4k", 16, size_bytes, seconds=seconds, jobs=4),
        Load("randrw", "4k", 16, size_bytes, seconds=seconds, jobs=4),
    ]


def _point_loads(setting: Setting, size_bytes: int) -> list[Load]:
    seconds = setting.sizes.seconds
    return [
        Load("read", "256k", 4, size_bytes, is_pass=True),
        # On one connection only: nbdkit keeps a buffer of the largest request for each
        # of its 16 threads a connection, which is 64 MiB for four of these.
        Load("read", "1m", 4, size_bytes, seconds=seconds),
        Load("read", "256k", 4, size_bytes, seconds=seconds, jobs=4),
        Load("randread", "4k", 16, size_bytes, seconds=seconds, jobs=4),
    ]


def measure(setting: Setting) -> None:
    disk = setting.disks()[0]
    sizes = setting.sizes
    point_loads = _point_loads(setting, disk.size_bytes)
    session_loads = _session_loads(setting, disk.size_bytes)
    folder = setting.folder("raw")
    raw = images.full_copy(disk, folder / "disk.raw")
    turn = 0

    def under_load(server: Server, point: str, session: str) -> dict[str, float]:
        with _PeakWatch(server.pid) as watch:
            for load in point_loads:
                fio.over_nbd(load, server.uri(point))
            for load in session_loads:
                fio.over_nbd(load, server.uri(session))
        after = memory_mib(server.pid)
        return {
            _PEAK: watch.peak_mib,
            _AFTER: after["RssAnon"] + after["RssShmem"],
            _RESIDENT: after["VmRSS"],
            _FILE_PAGES: after["RssFile"],
        }

    def in_session() -> dict[str, float]:
        nonlocal turn
        turn += 1
        coldrise = setting.coldrise(disk)
        session = f"memory{turn}"
        coldrise.publish(disk.name, session)
        with coldrise.serve(setting.socket("coldrise"), cache=sizes.memory_cache) as server:
            figures = under_load(server, f"{disk.name}/latest/vda", f"live/{session}/vda")
        coldrise.discard(session)
        return figures

    def on_raw() -> dict[str, float]:
        with nbdkit_file(raw, setting.socket("nbdkit")) as server:
            return under_load(server, "", "")

    # nbdkit file caches nothing: it shows the memory of nbdkit's own threads.
    results = setting.race("memory", {COLDRISE: in_session, _NBDKIT: on_raw}, sizes.few_rounds)
    images.removed(folder)
    limit_mib = sizes.memory_cache_bytes / MIB + _ALLOWANCE_MIB
    note = f"coldrise serve nbd --cache {sizes.memory_cache}; the server and its children, one load after the other"
    commands = "; ".join(load.text() for load in point_loads + session_loads)
    for title in (_PEAK, _AFTER, _RESIDENT, _FILE_PAGES):
        targets = [Target(at_most=limit_mib)] if title in (_PEAK, _AFTER) else []
        is_first = title == _PEAK
        setting.add(
            Row("memory", title, disk.name, "MiB", column(results, title), targets,
                commands if is_first else "", note if is_first else "")
        )

"""Reads and writes of a session's disk over NFSv3, against nfs-ganesha's own FSAL_VFS
on a fully allocated and written raw file.

fio's engine opens every file for writing, so the reads use a session without captured
blocks. The engine has no sync: writes are unstable and committed at the end.
"""

from __future__ import annotations

from contextlib import ExitStack

from bench.support import fio, images, nfs
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.images import MIB
from bench.support.setting import Setting

SUMMARY = "random and sequential reads and random writes of a session over NFSv3"

_FILE = "disk.raw"
# Of a repository that is not told otherwise.
_CHUNK_BYTES = 16 << 10


def measure(setting: Setting) -> None:
    program = nfs.fio_program(setting)
    disk = setting.disks()[0]
    folder = setting.folder("raw")
    images.full_copy(disk, folder / _FILE)
    window = {"size_bytes": disk.window_bytes, "offset_bytes": disk.window_offset_bytes}
    seconds = setting.sizes.seconds
    loads = {
        "random read 4K QD1, over NFS": ("IO/s", Load("randread", "4k", 1, **window, seconds=seconds)),
        "random read 4K QD16, over NFS": ("IO/s", Load("randread", "4k", 16, **window, seconds=seconds)),
        "sequential read 256K QD4, over NFS": ("MiB/s", Load("read", "256k", 4, **window, seconds=seconds)),
        # In a session of its own, because the reads need one without captured blocks.
        "random write 4K QD16, over NFS": ("IO/s", Load("randwrite", "4k", 16, **window, seconds=seconds)),
    }
    with ExitStack() as servers:
        started: dict[str, nfs.NfsServer] = {}

        def served(name: str) -> nfs.NfsServer:
            if name in started:
                return started[name]
            if name == COLDRISE:
                coldrise = setting.coldrise(disk)
                coldrise.publish(disk.name, "nfs-read")
                coldrise.publish(disk.name, "nfs-write")
                server = nfs.coldrise_nfs(setting, coldrise)
            else:
                server = nfs.ganesha_vfs(setting, folder)
            started[name] = servers.enter_context(server)
            if name == COLDRISE:
                # Only a part of each chunk: chunks that are read whole are not cached.
                with server.connect() as client:
                    handle = client.walk(server.root(), _path(name, "read"))
                    for at in range(0, disk.size_bytes, _CHUNK_BYTES):
                        client.read(handle, at, 512)
            return server

        def lane(name: str):
            def sample() -> dict[str, float]:
                server = served(name)
                figures = {}
                for title, (unit, load) in loads.items():
                    settle(setting.work)
                    kind = "write" if load.pattern.endswith("write") else "read"
                    outcome = fio.over_nfs(program, load, server, _path(name, kind))
                    figures[title] = (
                        outcome.operations_per_s if unit == "IO/s" else outcome.bytes_per_s / MIB
                    )
                return figures

            return sample

        results = setting.race(
            f"over NFS, {disk.name}", {COLDRISE: lane(COLDRISE), nfs.PEER: lane(nfs.PEER)},
            setting.sizes.rounds,
        )
    for title, (unit, load) in loads.items():
        setting.add(
            Row("nfs_data", title, disk.name, unit, column(results, title),
                [Target(nfs.PEER, at_least=0.95)], load.over_nfs_text(),
                "coldrise serve nfs --versions 3, every chunk decoded before")
        )
    images.removed(folder)


def _path(name: str, kind: str) -> str:
    return f"live/nfs-{kind}/vda.raw" if name == COLDRISE else _FILE

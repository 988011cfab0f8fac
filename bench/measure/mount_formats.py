"""Reads of a restore point's disk through its image files, mounted and over NBD.

Each writable format is compared with the raw file of the same disk; the cost of the
layout must be close to zero. Every chunk is decoded in the cache, and reads of the
mount bypass the kernel's page cache, so that only the path of a read is measured.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from bench.support import fio
from bench.support.commands import run
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.fio import Load
from bench.support.images import MIB, Disk
from bench.support.servers import Server
from bench.support.setting import Setting

SUMMARY = "reads through image files in every writable format, beside the raw one"

_RAW = "vda.raw"
# The two VMDK descriptors share one data file, and vda.external.qcow2 has the raw one.
_FILES = ["vda.vhd", "vda.vhdx", "vda-flat.vmdk", "vda.qcow2"]
_PLAIN = "plain file"
_SECONDS = 2
_PROBE_BYTES = 4096


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    disk = setting.disks()[0]
    coldrise = setting.coldrise(disk)
    folder = setting.folder("mounted")
    with ExitStack() as servers:
        mount = Server([setting.program, "mount", "--cache", "2G", folder], setting.socket("mount"),
                       env=coldrise.env, wait_for_line="mounted")
        servers.enter_context(mount)
        nbd = servers.enter_context(coldrise.serve(setting.socket("coldrise"), cache="2G"))
        point = folder / disk.name / "latest"
        starts = {file: _start(point / file, disk) for file in [_RAW, *_FILES]}
        for file in starts:
            # Decodes every chunk, in both servers.
            run(["cp", "--sparse=never", point / file, "/dev/null"])
            run(["nbdcopy", nbd.uri(f"{disk.name}/latest/{file}"), "null:"])

        def mounted(load: Load, file: str) -> fio.Outcome:
            path = disk.path if file == _PLAIN else point / file
            return fio.on_file(load.with_extra("--ioengine=libaio", "--direct=1", "--readonly"), path)

        def over_nbd(load: Load, file: str) -> fio.Outcome:
            return fio.over_nbd(load, nbd.uri(f"{disk.name}/latest/{file}"))

        _race(setting, disk, "mounted", mounted, {_PLAIN: 0, **starts})
        _race(setting, disk, "over NBD", over_nbd, starts)


def _start(path: Path, disk: Disk) -> int:
    """The offset of the disk's first byte in an image file with all of its bytes."""
    with open(disk.path, "rb") as raw, open(path, "rb") as image:
        raw.seek(disk.window_offset_bytes)
        probe = raw.read(_PROBE_BYTES)
        around = path.stat().st_size - disk.path.stat().st_size
        for start in range(0, around + 1, 512):
            image.seek(start + disk.window_offset_bytes)
            if image.read(_PROBE_BYTES) == probe:
                return start
    raise Failure(f"{path}: does not show the disk")


def _loads(disk: Disk, start: int) -> dict[str, tuple[str, Load]]:
    """The loads, with their units, for a file whose disk begins at `start`."""
    window = (disk.window_bytes, disk.window_offset_bytes + start)
    return {
        "random read 4K QD16": ("IO/s", Load("randread", "4k", 16, *window, seconds=_SECONDS)),
        "sequential read 256K QD4": ("MiB/s", Load("read", "256k", 4, *window, seconds=_SECONDS)),
    }


def _race(setting: Setting, disk: Disk, how: str, read, starts: dict[str, int]) -> None:
    def lane(file: str):
        def sample() -> dict[str, float]:
            figures = {}
            for title, (unit, load) in _loads(disk, starts[file]).items():
                outcome = read(load, file)
                figures[title] = (
                    outcome.operations_per_s if unit == "IO/s" else outcome.bytes_per_s / MIB
                )
            return figures

        return sample

    results = setting.race(f"image files {how}, {disk.name}", {file: lane(file) for file in starts},
                           setting.sizes.rounds)
    for title, (unit, load) in _loads(disk, 0).items():
        columns = column(results, title)
        for file in starts:
            against = _PLAIN if file == _RAW else _RAW
            if file == _PLAIN or file not in columns or against not in columns:
                continue
            samples = {COLDRISE: columns[file], against: columns[against]}
            targets = [Target(_RAW, at_least=0.95)] if against == _RAW else []
            setting.add(
                Row("mount_formats", f"{title} of {file}, {how}", disk.name, unit, samples, targets,
                    load.text(), "the decoded cache warm; a mounted file with libaio and O_DIRECT")
            )

"""fio: builds the command line of one job and parses its JSON."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Sequence

from .commands import run, spell
from .figures import Failure

# A run may exceed its nominal time; beyond this limit it is stuck.
_PATIENCE_S = 600


@dataclass(frozen=True)
class Load:
    """One fio job, without its target.

    `size_bytes` counts from `offset_bytes`. With `seconds` and `is_pass` unset the
    load repeats for that long. With `is_pass` it touches every block once and ends,
    after `seconds` at the latest if that is not 0.
    """

    pattern: str
    block: str
    depth: int
    size_bytes: int
    offset_bytes: int = 0
    seconds: int = 0
    is_pass: bool = False
    jobs: int = 1
    extra: tuple[str, ...] = ()

    def options(self) -> list[str]:
        words = [
            "--name=load",
            f"--rw={self.pattern}",
            f"--bs={self.block}",
            f"--iodepth={self.depth}",
            f"--offset={self.offset_bytes}",
            f"--size={self.size_bytes}",
            # fio adds no sync by itself: a measurement that includes one asks for it.
            "--end_fsync=0",
        ]
        if self.seconds:
            words.append(f"--runtime={self.seconds}")
        if not self.is_pass:
            words.append("--time_based")
        if self.jobs > 1:
            words += [f"--numjobs={self.jobs}", "--group_reporting"]
        return words + list(self.extra)

    def on_file_text(self) -> str:
        return spell(["fio", "--ioengine=psync", "--filename=FILE", *self.options()])

    def text(self) -> str:
        return spell(["fio", "--ioengine=nbd", "--uri=URI", *self.options()])

    def over_nfs_text(self) -> str:
        return spell(["fio", "--ioengine=nfs", "--nfs_url=URI", "--filename=FILE", *self.options()])

    def over_iscsi_text(self) -> str:
        return spell(["fio", "--ioengine=libiscsi", "--filename=URI", *self.options()])

    def with_extra(self, *extra: str) -> "Load":
        return replace(self, extra=self.extra + extra)


@dataclass(frozen=True)
class Outcome:
    """fio's results: operations and bytes per second, the number of operations, and
    the mean time of one of them in microseconds."""

    operations_per_s: float
    bytes_per_s: float
    operations: int
    mean_us: float


def over_nbd(load: Load, uri: str) -> Outcome:
    return _outcome(["--ioengine=nbd", f"--uri={uri}", *load.options()])


def over_many_nbd(load: Load, uris: Sequence[str]) -> Outcome:
    """The same load on several exports at once, in a process each; the sum."""
    options = ["--name=global" if word == "--name=load" else word for word in load.options()]
    jobs = [word for number, uri in enumerate(uris) for word in (f"--name=load{number}", f"--uri={uri}")]
    return _outcome([*options, "--ioengine=nbd", "--group_reporting", *jobs])


def over_nfs(program: Path, load: Load, server, path: str) -> Outcome:
    """The same load through fio's NFS engine, inside the server's network. fio splits
    file names at colons, so the path must not contain any."""
    options = ["--ioengine=nfs", f"--nfs_url={server.uri()}", f"--filename={path}", *load.options()]
    return _outcome(options, server.network.command(program))


def over_iscsi(program: Path, load: Load, uri: str) -> Outcome:
    """The same load through fio's iSCSI engine. fio splits names at colons that have no backslash."""
    escaped = uri.replace(":", "\\:")
    return _outcome(["--ioengine=libiscsi", f"--filename={escaped}", *load.options()], [program])


def on_file(load: Load, path: Path) -> Outcome:
    """The same load with pwrite and pread on a file."""
    return _outcome(["--ioengine=psync", f"--filename={path}", *load.options()])


def _outcome(options: list[str], program: Sequence[object] = ("fio",)) -> Outcome:
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        said = run(
            [*program, *options, "--output-format=json", f"--output={report.name}"], timeout_s=_PATIENCE_S
        )
        text = Path(report.name).read_text()
    # fio prints warnings in front of the JSON.
    start = text.find("{")
    if start < 0:
        raise Failure(f"fio {spell(options)}: no JSON in its report: {(text + said)[-500:]}")
    job = json.loads(text[start:])["jobs"][0]
    if job["error"] != 0:
        raise Failure(f"fio {spell(options)}: error {job['error']}")
    parts = [job["read"], job["write"]]
    operations = sum(part["total_ios"] for part in parts)
    if operations == 0:
        raise Failure(f"fio {spell(options)}: did nothing")
    return Outcome(
        operations_per_s=sum(part["iops"] for part in parts),
        bytes_per_s=sum(part["bw_bytes"] for part in parts),
        operations=operations,
        mean_us=sum(part["lat_ns"]["mean"] * part["total_ios"] for part in parts) / operations / 1000,
    )

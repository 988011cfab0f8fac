"""Describes the machine of the measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

_VERSIONS = {
    "fio": ["fio", "--version"],
    "nbdkit": ["nbdkit", "--version"],
    "qemu": ["qemu-img", "--version"],
    "zstd": ["zstd", "--version"],
    "restic": ["restic", "version"],
    "rsync": ["rsync", "--version"],
    "ssh": ["ssh", "-V"],
    "postgresql": ["/usr/lib/postgresql/15/bin/postgres", "--version"],
    "borg": ["borg", "--version"],
}


def _first_line(argv: list[str]) -> str:
    try:
        done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "not installed"
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else "unknown"


def _field(path: str, key: str) -> str:
    for line in Path(path).read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return "unknown"


def mhz() -> float:
    """The processor's frequency, as the kernel says it."""
    return float(_field("/proc/cpuinfo", "cpu MHz"))


def describe(project: Path, work: Path) -> dict[str, str]:
    commit = _first_line(["git", "-C", str(project), "log", "-1", "--format=%h"])
    if "fatal" in commit:
        commit = "none"
    changed = subprocess.run(
        ["git", "-C", str(project), "status", "--porcelain"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    return {
        "commit": commit + (" (with changes)" if changed else ""),
        "cpu": f"{_field('/proc/cpuinfo', 'model name')}, {len(os.sched_getaffinity(0))} cores",
        "memory": _field("/proc/meminfo", "MemTotal"),
        "kernel": platform.release(),
        "file system": _first_line(["findmnt", "-n", "-o", "FSTYPE,OPTIONS", "--target", str(work)]),
        "load before": f"{os.getloadavg()[0]:.2f}",
        **{name: _first_line(argv) for name, argv in _VERSIONS.items()},
    }

"""The disk of a database server: PostgreSQL's data and its log, as pgbench leaves them.

It is made once and kept. A second state is the same disk after more transactions: what a replication has to send.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from .commands import run
from .figures import Failure
from .images import MIB

_PROGRAMS = Path("/usr/lib/postgresql/15/bin")
_SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{folder}'
fsync = off
max_wal_size = {log_mib}MB
min_wal_size = 32MB
wal_keep_size = {log_mib}MB
autovacuum = off
"""


@dataclass(frozen=True)
class DatabaseDisk:
    """Raw images of one disk: before and after `transactions`."""

    before: Path
    after: Path
    transactions: int


def database_disk(folder: Path, size_mib: int) -> DatabaseDisk:
    """An ext4 disk of that size, two thirds full: tables and a log that was kept."""
    scale, transactions = max(1, size_mib // 60), size_mib * 20
    disk = DatabaseDisk(folder / f"postgres-{size_mib}M.raw", folder / f"postgres-{size_mib}M-later.raw", transactions)
    if disk.after.exists():
        return disk
    if os.geteuid() != 0:
        raise Failure("the database's disk is mounted while it is made: run as root")
    if not (_PROGRAMS / "initdb").exists():
        raise Failure("PostgreSQL 15 is not installed: make bench-deps")
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / "postgres.unfinished"
    unfinished.unlink(missing_ok=True)
    with open(unfinished, "wb") as made:
        made.truncate(size_mib * MIB)
    run(["mkfs.ext4", "-q", "-F", "-E", "lazy_itable_init=0,lazy_journal_init=0", unfinished])
    with _mounted(unfinished, folder) as mounted:
        run(["chown", "postgres:", mounted])
        _as_postgres(mounted, "initdb", "--no-sync", "-D", "data", "--data-checksums")
        (mounted / "data" / "postgresql.conf").open("a").write(_SETTINGS.format(folder=mounted, log_mib=max(32, size_mib // 5)))
        with _server(mounted):
            _as_postgres(mounted, "pgbench", "-q", "-i", "-s", scale, "-h", mounted, "postgres")
            _as_postgres(mounted, "pgbench", "-n", "-t", transactions, "-h", mounted, "postgres")
    run(["cp", "--sparse=always", unfinished, disk.before])
    with _mounted(unfinished, folder) as mounted, _server(mounted):
        _as_postgres(mounted, "pgbench", "-n", "-t", transactions // 4, "-h", mounted, "postgres")
    unfinished.rename(disk.after)
    return disk


@contextlib.contextmanager
def _mounted(image: Path, folder: Path) -> Iterator[Path]:
    # The server's user must reach it: the folder of the images may be private. A socket's path is short.
    place = Path("/run") / f"coldrise-bench-{os.getpid()}"
    place.mkdir(mode=0o755)
    run(["mount", "-o", "loop", image, place])
    try:
        yield place
    finally:
        run(["umount", place])
        place.rmdir()


@contextlib.contextmanager
def _server(mounted: Path) -> Iterator[None]:
    process = subprocess.Popen(
        ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", _PROGRAMS / "postgres", "-D", mounted / "data"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=mounted)
    try:
        until = time.monotonic() + 60
        while subprocess.run([_PROGRAMS / "pg_isready", "-q", "-h", mounted], check=False).returncode != 0:
            if time.monotonic() > until or process.poll() is not None:
                raise Failure(f"PostgreSQL in {mounted} does not start")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(timeout=300)


def _as_postgres(mounted: Path, program: str, *words: object) -> None:
    run(["setpriv", "--reuid", "postgres", "--regid", "postgres", "--clear-groups", _PROGRAMS / program, *words], cwd=mounted)

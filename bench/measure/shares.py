"""Random requests to a session's disk over SMB and iSCSI, against the same smbd and tgtd on a plain raw file, and on it
through a FUSE file system that does nothing but pass requests on: that is the share of a mount alone.

Cold: no part of the disk is in memory, the server has just started, and no trace of an earlier round is read ahead. Warm:
everything was read once before.
"""

from __future__ import annotations

import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Callable

from bench.support import images, nfs, shares
from bench.support.coldrise import Coldrise
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.setting import Setting
from bench.support.shares import ShareServer

SUMMARY = "random requests to a session over SMB and iSCSI"

_FILE = "disk.raw"
_READ_COLD, _READ_WARM, _WRITE = "random read 4K QD16, cold", "random read 4K QD16, warm", "random write 4K QD16"
_SMB_NOTE = "16 connections with one request each (bench/support/smb_load.c), encrypted"


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    disk = setting.disks()[0]
    folder = setting.folder("plain")
    plain = folder / _FILE
    images.full_copy(disk, plain)
    coldrise = setting.coldrise(disk)
    loads = {
        kind: Load(pattern, "4k", 16, disk.size_bytes, seconds=setting.sizes.seconds)
        for kind, pattern in ((_READ_COLD, "randread"), (_READ_WARM, "randread"), (_WRITE, "randwrite"))
    }
    protocols = {"SMB": (_smb(setting, coldrise, plain, loads), shares.SMBD),
                 "iSCSI": (_iscsi(setting, coldrise, plain, loads), shares.TGTD)}
    for protocol, (contestant, peer) in protocols.items():
        lanes = {COLDRISE: lambda: contestant(COLDRISE), peer: lambda: contestant(peer),
                 shares.PASSED: lambda: contestant(shares.PASSED)}
        results = setting.race(f"over {protocol}, {disk.name}", lanes, setting.sizes.rounds)
        for kind, load in loads.items():
            command = load.over_iscsi_text() if protocol == "iSCSI" else ""
            setting.add(
                Row("shares", f"{kind}, over {protocol}", disk.name, "IO/s", column(results, kind),
                    [Target(peer, at_least=0.9)], command, _SMB_NOTE if protocol == "SMB" else "no CHAP")
            )
    images.removed(folder)


def _smb(setting: Setting, coldrise: Coldrise, plain: Path, loads: dict[str, Load]) -> Callable:
    program = shares.smb_program(setting)

    def sample(whose: str) -> dict[str, float]:
        with ExitStack() as servers:
            path = _prepared(setting, coldrise, plain, servers, whose)
            # The peer has the configuration of ours.
            server = servers.enter_context(shares.coldrise_smb(setting, coldrise))
            if whose != COLDRISE:
                server = servers.enter_context(shares.plain_smb(setting, server, path.parent))
            path = path.name if whose != COLDRISE else path
            kinds = {_READ_COLD: "read", _READ_WARM: "reread", _WRITE: "write"}
            return _figures(setting, loads, lambda kind: shares.smb_requests(
                program, kinds[kind], server, path, loads[kind]))

    return sample


def _iscsi(setting: Setting, coldrise: Coldrise, plain: Path, loads: dict[str, Load]) -> Callable:
    program = nfs.fio_program(setting)

    def sample(whose: str) -> dict[str, float]:
        with ExitStack() as servers:
            path = _prepared(setting, coldrise, plain, servers, whose)
            server: ShareServer
            if whose == COLDRISE:
                server = servers.enter_context(shares.coldrise_iscsi(setting, coldrise, ["shared"]))
            else:
                server = servers.enter_context(shares.plain_iscsi(setting))
                shares.add_plain_target(setting, path)
            session = "shared" if whose == COLDRISE else None

            def requests(kind: str) -> float:
                if kind == _READ_WARM:
                    everything = Load("read", "1m", 4, loads[kind].size_bytes, is_pass=True)
                    shares.iscsi_requests(program, server, session, everything)
                return shares.iscsi_requests(program, server, session, loads[kind]).operations_per_s

            return _figures(setting, loads, requests)

    return sample


def _prepared(setting: Setting, coldrise: Coldrise, plain: Path, servers: ExitStack, whose: str) -> Path:
    """Publishes a new session, and drops what is in memory. Returns the disk's path, for a session in the share."""
    if whose == COLDRISE:
        shutil.rmtree(coldrise.repository / "traces", ignore_errors=True)
        coldrise.publish(setting.disks()[0].name, "shared")
        servers.callback(coldrise.discard, "shared")
    settle(setting.work)
    for path in [plain, *coldrise.repository.rglob("*")]:
        if path.is_file():
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if whose == shares.PASSED:
        return servers.enter_context(shares.passed(setting, plain.parent)).folder / _FILE
    return Path("live/shared/vda.raw") if whose == COLDRISE else plain


def _figures(setting: Setting, loads: dict[str, Load], requests: Callable[[str], float]) -> dict[str, float]:
    figures = {}
    for kind in loads:
        settle(setting.work)
        figures[kind] = requests(kind)
    return figures

"""Lists a machine with very many restore points with all attributes, from a server or
a mount that has just started."""

from __future__ import annotations

import time
from pathlib import Path

from bench.support import nfs
from bench.support.commands import run, timed
from bench.support.coldrise import Coldrise
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.servers import Server
from bench.support.setting import Setting

SUMMARY = "a list of 1,000 restore points and their files, over NFS and mounted"

_POINTS = 1000
_MACHINE = "many"
_OVER_NFS = "list of 1,000 points, READDIRPLUS"
_MOUNTED = "list of 1,000 points, mounted, ls -lR"


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    run(["cargo", "build", "--release", "--locked", "-p", "coldrise-store", "--example", "many_points"])
    coldrise = _repository(setting)
    folder = setting.folder("points")

    def sample() -> dict[str, float]:
        with nfs.coldrise_nfs(setting, coldrise) as server:
            over_nfs_s = _list_s(server)
        mount = Server([setting.program, "mount", folder], setting.socket("mount"), env=coldrise.env,
                       wait_for_line="mounted")
        with mount:
            mounted_s = timed(["sh", "-c", 'ls -lR "$1" | wc -l', "sh", folder / _MACHINE])
        return {_OVER_NFS: over_nfs_s, _MOUNTED: mounted_s}

    results = setting.race("list", {COLDRISE: sample}, setting.sizes.few_rounds)
    for title, note in ((_OVER_NFS, "a client in Python"), (_MOUNTED, "")):
        setting.add(
            Row("listing", title, f"{_POINTS} points, 12 files each", "s", column(results, title),
                [Target(at_most=1.0)], "", note)
        )


def _repository(setting: Setting) -> Coldrise:
    folder = setting.folder("many-points")
    image = folder / "disk.raw"
    image.write_bytes(b"coldrise" * (1 << 17))
    repository = folder / "repository"
    coldrise = setting.new_coldrise(repository)
    # The example opens no other.
    coldrise.env.pop("COLDRISE_PASSPHRASE_FILE")
    coldrise.call("init", "--no-encryption")
    coldrise.call("backup", _MACHINE, f"vda=raw:{image}")
    example = Path(setting.program).parent / "examples" / "many_points"
    run([example, repository, _MACHINE, _POINTS - 1])
    return coldrise


def _list_s(server: nfs.NfsServer) -> float:
    root = server.root()
    with server.connect() as client:
        began = time.monotonic()
        machine = client.lookup(root, _MACHINE)
        for name, (_, handle) in client.list_plus(machine).items():
            if name != "latest":
                client.list_plus(handle)
        return time.monotonic() - began

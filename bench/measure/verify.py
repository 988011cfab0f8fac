"""Verifies a repository, against decrypting the same files without other work."""

from __future__ import annotations

import os
import subprocess

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import aead_cat, settle, timed
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB
from bench.support.setting import Setting

SUMMARY = "verify of a whole repository"

_TITLE = "verify"
_CIPHER = "cat through AES-256-GCM"
_CHUNK_BYTES = 16 << 10


def measure(setting: Setting) -> None:
    for disk in setting.disks():
        shared = setting.coldrise(disk)
    _measure(setting, shared, " and ".join(disk.name for disk in setting.disks()), "as it is by default")
    # Large enough that process start and key derivation matter little: the same bytes twice,
    # with no two equal chunks.
    folder = setting.folder("verify")
    disk = images.many_chunks(setting.store / "images", setting.sizes.many_chunks_bytes, 4096)
    shifted = folder / "shifted.raw"
    with open(shifted, "wb") as target:
        subprocess.run(["tail", "-c", "+513", disk.path], stdout=target, check=True)
        target.truncate(disk.size_bytes)
    large = setting.new_coldrise(folder / "repository")
    large.init(compression="none")
    for machine, path in (("large", disk.path), ("shifted", shifted)):
        large.call("backup", machine, f"vda=raw:{path}")
    shifted.unlink()
    _measure(setting, large, disk.name, "no compression")
    images.removed(folder)


def _measure(setting: Setting, coldrise: Coldrise, disk: str, how: str) -> None:
    cipher = aead_cat(setting.project)
    files = sorted((coldrise.repository / "db").glob("*.sst"))
    stored_mib = sum(path.stat().st_size for path in files) / MIB
    threads = len(os.sched_getaffinity(0))

    def verify() -> dict[str, float]:
        settle(setting.work)
        return {_TITLE: stored_mib / coldrise.call_timed("verify")}

    def read_through_cipher() -> dict[str, float]:
        settle(setting.work)
        return {_TITLE: stored_mib / timed([cipher, "verify", threads, _CHUNK_BYTES, *files])}

    coldrise.preread()
    contestants = {COLDRISE: verify, _CIPHER: read_through_cipher}
    results = setting.race("verify", contestants, setting.sizes.few_rounds)
    note = f"coldrise verify; the files of its database by aead_cat, {threads} threads; {stored_mib:,.0f} MiB, {how}; in the page cache"
    setting.add(Row("verify", _TITLE, disk, "MiB/s", column(results, _TITLE), [Target(_CIPHER, at_least=0.8)], "", note))

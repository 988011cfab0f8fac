"""Backup and restore of one disk, against plain compression, a plain copy, and the
common backup programs. Every restored image is compared with its source. The limits of a
backup read the disk, hash, compress and encrypt each chunk, and write nothing."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Callable, Iterable

from bench.support import images, peers
from bench.support.commands import aead_cat, run, settle, timed
from bench.support.figures import COLDRISE, Contestant, Failure, Row, Target, column
from bench.support.images import Disk
from bench.support.setting import Setting

SUMMARY = "backup and restore of one disk: time and stored size"

_STORE = "backup"
_STORE_PLAIN = "backup, --compression none"
_STORE_DURABLE = "backup, until it is on the disk"
_STORED = "stored size"
_RESTORE = "restore"
_RESTORE_DURABLE = "restore, until it is on the disk"

_LIMITS = {
    "none": "cat, BLAKE3 and AES-256-GCM",
    "zstd:1": "cat, BLAKE3, zstd:1 and AES-256-GCM",
}
_CHUNK_BYTES = 16 << 10

MakeTool = Callable[[Path], peers.Tool]


def measure(setting: Setting) -> None:
    tools = _tools(setting)
    for disk in setting.disks():
        _measure_disk(setting, disk, tools)
    _measure_plain(setting, setting.disks()[0])


def _tools(setting: Setting) -> dict[str, MakeTool]:
    def coldrise(folder: Path) -> peers.Tool:
        if setting.program is None:
            raise Failure("no coldrise program")
        return peers.ColdriseTool(folder, setting.program, setting.chunk_size, setting.compression)

    tools: dict[str, MakeTool] = {COLDRISE: coldrise}
    tools |= {kind.name: kind for kind in (peers.Zstd, peers.Cp, peers.Restic, peers.Borg, peers.QemuImg)}
    try:
        program = peers.install_benji(
            setting.store / "benji", setting.project / "bench" / "benji-requirements.txt"
        )
    except Failure as error:
        setting.left_out["Benji"] = " ".join(str(error).split())
        setting.say(f"  Benji is left out: {error}")
    else:
        tools["Benji"] = lambda folder: peers.Benji(folder, program, True)
        tools["Benji, not encrypted"] = lambda folder: peers.Benji(folder, program, False)
    return tools


def _sample(setting: Setting, disk: Disk, make: MakeTool) -> dict[str, float]:
    folder = setting.folder("backup")
    tool = make(folder)
    figures: dict[str, float] = {}
    if not isinstance(tool, peers.Cp):
        tool.prepare()
        settle(setting.work)
        figures[_STORE] = tool.store(disk.path)
        figures[_STORE_DURABLE] = figures[_STORE] + settle(setting.work)
        figures[_STORED] = tool.stored_mib()
        tool.preread()
    target = folder / "restored.raw"
    settle(setting.work)
    figures[_RESTORE] = tool.restore(disk.path, target)
    figures[_RESTORE_DURABLE] = figures[_RESTORE] + settle(setting.work)
    run(["cmp", disk.path, target])
    images.removed(folder)
    return figures


def _measure_disk(setting: Setting, disk: Disk, tools: dict[str, MakeTool]) -> None:
    def lane(make: MakeTool):
        def contestant() -> dict[str, float]:
            try:
                return _sample(setting, disk, make)
            finally:
                images.removed(setting.folder("backup"))

        return contestant

    contestants = {name: lane(make) for name, make in tools.items()} | _limits(setting, disk, _STORE, _LIMITS)
    results = setting.race(f"backup, {disk.name}", contestants, setting.sizes.few_rounds)
    rivals = [name for name in tools if name not in (COLDRISE, peers.Zstd.name, peers.Cp.name)]
    ahead = [Target(name, at_most=1.0) for name in rivals]
    store_targets = [Target(peers.Zstd.name, at_most=1.5), *ahead]
    restore_targets = [Target(peers.Cp.name, at_most=1.5), *ahead]
    rows = [
        (_STORE, "s", store_targets, _texts(tools, "store_text") + "; aead_cat"),
        (_STORE_DURABLE, "s", [], "the same and syncfs behind it"),
        (_STORED, "MiB", [], "what the store occupies on the disk"),
        (_RESTORE, "s", restore_targets, _texts(tools, "restore_text")),
        (_RESTORE_DURABLE, "s", [], "the same and syncfs behind it"),
    ]
    for title, unit, targets, note in rows:
        setting.add(
            Row("backup_restore", title, disk.name, unit, column(results, title), targets, "", note)
        )


def _limits(setting: Setting, disk: Disk, title: str, kinds: Iterable[str]) -> dict[str, Contestant]:
    try:
        program, threads = aead_cat(setting.project), len(os.sched_getaffinity(0))
    except Failure as error:
        setting.left_out |= {_LIMITS[kind]: " ".join(str(error).split()) for kind in kinds}
        return {}

    def contestant(kind: str) -> dict[str, float]:
        settle(setting.work)
        return {title: timed([program, kind, threads, _CHUNK_BYTES, disk.path])}

    return {_LIMITS[kind]: partial(contestant, kind) for kind in kinds}


def _measure_plain(setting: Setting, disk: Disk) -> None:
    """A backup into a repository without compression."""
    folder = setting.folder("plain")

    def store(make: MakeTool) -> dict[str, float]:
        try:
            tool = make(setting.folder("plain"))
            tool.prepare()
            settle(setting.work)
            return {_STORE_PLAIN: tool.store(disk.path)}
        finally:
            images.removed(folder)

    contestants = {
        COLDRISE: lambda: store(lambda where: peers.ColdriseTool(where, setting.program, setting.chunk_size, "none")),
        peers.Zstd.name: lambda: store(peers.Zstd),
    } | _limits(setting, disk, _STORE_PLAIN, ["none"])
    results = setting.race(f"{_STORE_PLAIN}, {disk.name}", contestants, setting.sizes.few_rounds)
    setting.add(
        Row("backup_restore", _STORE_PLAIN, disk.name, "s", column(results, _STORE_PLAIN),
            [Target(peers.Zstd.name, at_most=0.6)], "",
            f"{peers.ColdriseTool.store_text}; {peers.Zstd.store_text}; aead_cat none")
    )


_KINDS = (peers.ColdriseTool, peers.Zstd, peers.Cp, peers.Restic, peers.Borg, peers.QemuImg, peers.Benji)


def _texts(tools: dict[str, MakeTool], which: str) -> str:
    texts = [getattr(kind, which) for kind in _KINDS if kind is not peers.Benji or "Benji" in tools]
    return "; ".join(text for text in texts if text)

"""Backup and restore of one disk, against plain compression, a plain copy, and the
common backup programs. Every restored image is compared with its source."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

from bench.support import images, peers
from bench.support.commands import run, settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.images import Disk
from bench.support.setting import Setting

SUMMARY = "backup and restore of one disk: time and stored size"

_STORE = "backup"
_STORE_DURABLE = "backup, until it is on the disk"
_STORED = "stored size"
_RESTORE = "restore"
_RESTORE_DURABLE = "restore, until it is on the disk"

MakeTool = Callable[[Path], peers.Tool]


def measure(setting: Setting) -> None:
    tools = _tools(setting)
    for disk in setting.disks():
        _measure_disk(setting, disk, tools)


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

    contestants = {name: lane(make) for name, make in tools.items()}
    results = setting.race(f"backup, {disk.name}", contestants, setting.sizes.few_rounds)
    rivals = [name for name in tools if name not in (COLDRISE, peers.Zstd.name, peers.Cp.name)]
    ahead = [Target(name, at_most=1.0) for name in rivals]
    store_targets = [Target(peers.Zstd.name, at_most=1.5), *ahead]
    restore_targets = [Target(peers.Cp.name, at_most=1.5), *ahead]
    rows = [
        (_STORE, "s", store_targets, _texts(tools, "store_text")),
        (_STORE_DURABLE, "s", [], "the same and syncfs behind it"),
        (_STORED, "MiB", [], "what the store occupies on the disk"),
        (_RESTORE, "s", restore_targets, _texts(tools, "restore_text")),
        (_RESTORE_DURABLE, "s", [], "the same and syncfs behind it"),
    ]
    for title, unit, targets, note in rows:
        setting.add(
            Row("backup_restore", title, disk.name, unit, column(results, title), targets, "", note)
        )


_KINDS = (peers.ColdriseTool, peers.Zstd, peers.Cp, peers.Restic, peers.Borg, peers.QemuImg, peers.Benji)


def _texts(tools: dict[str, MakeTool], which: str) -> str:
    texts = [getattr(kind, which) for kind in _KINDS if kind is not peers.Benji or "Benji" in tools]
    return "; ".join(text for text in texts if text)

"""An incremental backup by dirty bitmap, as a share of the full one.

Every second 64 MiB of the qcow2 disk hold data. A persistent bitmap records writes of
64 KiB scattered over the data, 1 % of the disk's size. Both backups read the disk
through qemu-nbd.
"""

from __future__ import annotations

import random
from pathlib import Path

from bench.support import images
from bench.support.coldrise import Coldrise
from bench.support.commands import preread, run, settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import GIB, MIB
from bench.support.nbd import Connection
from bench.support.servers import qemu_nbd
from bench.support.setting import Setting

SUMMARY = "incremental backup by bitmap as a share of the full one"

_BITMAP = "bench"
_CHANGED_SHARE = 0.01
_UNIT_BYTES = 64 << 10
_REGION_BYTES = 64 * MIB
_FULL = "full backup"
_INCREMENTAL = "incremental backup by bitmap, 1 % changed"
_SHARE = "incremental / full"


def measure(setting: Setting) -> None:
    folder = setting.folder("incremental")
    size = setting.sizes.incremental_disk_bytes
    image = _build(setting, folder, size)
    turn = 0

    def sample() -> dict[str, float]:
        nonlocal turn
        turn += 1
        return _sample(setting, folder, image, size, turn)

    results = setting.race("incremental", {COLDRISE: sample}, setting.sizes.few_rounds)
    subject = f"{size / GIB:.3g} GiB, half of it data"
    for title in (_FULL, _INCREMENTAL):
        setting.add(Row("incremental", title, subject, "s", column(results, title)))
    setting.add(
        Row("incremental", _SHARE, subject, "%", column(results, _SHARE), [Target(at_most=3)], "",
            f"qemu-nbd --read-only --bitmap {_BITMAP}; bitmap of 64 KiB granularity, {_CHANGED_SHARE:.0%} "
            "of the disk rewritten in scattered 64 KiB")
    )
    images.removed(folder)


def _is_data(offset: int) -> bool:
    return (offset // _REGION_BYTES) % 2 == 0


def _build(setting: Setting, folder: Path, size: int) -> Path:
    raw = folder / "disk.raw"
    extents = images.half_random_extents(size // 2, seed=3)
    with open(raw, "wb") as stream:
        for region in range(0, size, 2 * _REGION_BYTES):
            stream.seek(region)
            for _ in range(_REGION_BYTES // images.EXTENT_BYTES):
                stream.write(next(extents))
        stream.truncate(size)
    image = folder / "disk.qcow2"
    run(["qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, image])
    raw.unlink()
    run(["qemu-img", "bitmap", "--add", "-g", str(_UNIT_BYTES), image, _BITMAP])
    _check_bitmap(setting, image, size)
    return image


def _change(setting: Setting, image: Path, size: int, turn: int) -> int:
    """Clears the bitmap, then writes new content to scattered places of the disk's
    data, which the bitmap records. Returns the bytes written."""
    run(["qemu-img", "bitmap", "--clear", image, _BITMAP])
    places = images.scattered(size // 2, _UNIT_BYTES, 2 * _CHANGED_SHARE, seed=turn)
    rng = random.Random(1000 + turn)
    with qemu_nbd(image, setting.socket("change"), read_only=False) as server:
        with Connection(server.socket_path, "") as connection:
            for place in places:
                region, within = divmod(place, _REGION_BYTES)
                connection.write(2 * region * _REGION_BYTES + within, images.stamped(rng, _UNIT_BYTES))
            connection.flush()
    return len(places) * _UNIT_BYTES


def _check_bitmap(setting: Setting, image: Path, size: int) -> None:
    """The measurement relies on the bitmap: it must contain exactly the changes."""
    changed = _change(setting, image, size, 0)
    with qemu_nbd(image, setting.socket("source"), bitmap=_BITMAP) as server:
        listing = run(["nbdinfo", f"--map=qemu:dirty-bitmap:{_BITMAP}", "--totals", server.uri()])
    dirty = sum(int(line.split()[0]) for line in listing.splitlines() if line.split()[-1] == "dirty")
    if dirty != changed:
        raise ValueError(f"the bitmap marks {dirty} bytes as dirty where {changed} were written:\n{listing}")


def _sample(setting: Setting, folder: Path, image: Path, size: int, turn: int) -> dict[str, float]:
    coldrise: Coldrise = setting.new_coldrise(folder / "repository")
    coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)

    def backup(*options: str) -> float:
        preread(image)
        settle(setting.work)
        with qemu_nbd(image, setting.socket("source"), bitmap=_BITMAP) as server:
            return coldrise.call_timed("backup", "disk", f"vda={server.uri()}", *options)

    full_s = backup()
    _change(setting, image, size, turn)
    incremental_s = backup("--bitmap", _BITMAP)
    images.removed(coldrise.repository)
    return {_FULL: full_s, _INCREMENTAL: incremental_s, _SHARE: 100 * incremental_s / full_s}

"""Restores to image formats, against qemu-img converting the same raw disk to the same
format. Every restored image is compared with its source."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from bench.support import images
from bench.support.commands import run, settle, timed
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.images import MIB, Disk
from bench.support.setting import Setting

SUMMARY = "restores to vhd, vhdx, vmdk, qcow2 and the VMDK of an OVA"

_QEMU = "qemu-img convert"
_ZSTD = "qemu-img convert of a zstd qcow2"
_DURABLE = ", until it is on the disk"


@dataclass(frozen=True)
class _Format:
    word: str
    driver: str
    options: str
    # Relative to qemu-img, which does not wait for the disk; coldrise does.
    at_least: float


_FORMATS = [
    _Format("vhd", "vpc", "subformat=dynamic,force_size=on", 2),
    _Format("vhd-fixed", "vpc", "subformat=fixed,force_size=on", 2),
    _Format("vhdx", "vhdx", "subformat=dynamic", 2),
    _Format("vmdk", "vmdk", "subformat=monolithicSparse", 2),
    _Format("vmdk-hosted", "vmdk", "subformat=monolithicFlat", 2),
    _Format("vmdk-stream", "vmdk", "subformat=streamOptimized", 0.9),
    _Format("qcow2", "qcow2", "compat=1.1", 2),
]


def measure(setting: Setting) -> None:
    for disk in setting.disks():
        folder = setting.folder("restore-formats")
        packed = folder / "zstd.qcow2"
        command = ["qemu-img", "convert", "-c", "-f", "raw", "-O", "qcow2", "-o", "compression_type=zstd"]
        run([*command, disk.path, packed])
        for each in _FORMATS:
            _measure_format(setting, disk, each, packed)
        images.removed(folder)


def _measure_format(setting: Setting, disk: Disk, to: _Format, packed: Path) -> None:
    title = f"restore --format {to.word}"
    coldrise = setting.coldrise(disk) if setting.program else None
    target = packed.with_name("out.image")

    def sample(write) -> dict[str, float]:
        settle(setting.work)
        began = time.monotonic()
        took_s = write()
        settle(setting.work)
        durable_s = time.monotonic() - began
        run(["qemu-img", "compare", "-f", "raw", "-F", to.driver, disk.path, target])
        for path in target.parent.glob("out*"):
            images.removed(path)
        size_mib = disk.size_bytes / MIB
        return {title: size_mib / took_s, title + _DURABLE: size_mib / durable_s}

    def convert(source: Path, driver: str) -> dict[str, float]:
        command = ["qemu-img", "convert", "-f", driver, "-O", to.driver, "-o", to.options]
        return sample(lambda: timed([*command, source, target]))

    def restore() -> dict[str, float]:
        words = ["restore", f"{disk.name}/latest/vda", target, "--format", to.word]
        return sample(lambda: coldrise.call_timed(*words))

    contestants = {
        COLDRISE: restore,
        _QEMU: lambda: convert(disk.path, "raw"),
        _ZSTD: lambda: convert(packed, "qcow2"),
    }
    results = setting.race(f"{title}, {disk.name}", contestants, setting.sizes.few_rounds)
    note = f"coldrise restore {disk.name}/latest/vda TARGET --format {to.word}; "
    note += f"qemu-img convert -f raw -O {to.driver} -o {to.options} IMAGE TARGET"
    rows = [
        (title, [Target(_QEMU, at_least=to.at_least)], note),
        (title + _DURABLE, [], "the same and syncfs behind it"),
    ]
    for row, targets, text in rows:
        values = column(results, row)
        setting.add(Row("restore_formats", row, disk.name, "MiB/s", values, targets, "", text))

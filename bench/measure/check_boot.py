"""Checks the boot of the guest with `coldrise check-boot`, and boots its raw image. The machine is the
same; the check's time is that of the whole command, the plain boot's is from QEMU's start to the
login prompt."""

from __future__ import annotations

from bench.measure.boot import boot_s
from bench.support import images
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.setting import Setting
from tests.support.guest import kvm_works, raw_disk

SUMMARY = "check-boot of the guest, and its plain boot"

_PLAIN = "plain boot, raw file"
_TITLE = "check-boot to the login prompt"


def measure(setting: Setting) -> None:
    disk = setting.guest()
    folder = setting.folder("check-boot")
    copy = folder / "guest.raw"

    def plain() -> dict[str, float]:
        images.sparse_copy(disk, copy)
        settle(setting.work)
        return {_TITLE: boot_s(setting, raw_disk(copy))}

    def checked() -> dict[str, float]:
        coldrise = setting.coldrise(disk)
        settle(setting.work)
        took_s = coldrise.call_timed(
            "check-boot", f"{disk.name}/latest", "--memory", "1G", "--cpus", "2"
        )
        return {_TITLE: took_s}

    results = setting.race("check-boot", {COLDRISE: checked, _PLAIN: plain}, setting.sizes.few_rounds)
    accelerator = "KVM" if kvm_works() else "emulation (no KVM here)"
    setting.add(
        Row("check-boot", _TITLE, disk.name, "s", column(results, _TITLE), [Target(_PLAIN, at_most=1.25)], "",
            f"QEMU, {accelerator}, 2 CPUs, 1 GiB; the whole command beside QEMU's start to the prompt")
    )
    images.removed(folder)

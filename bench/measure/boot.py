"""Boots the guest to its login prompt from its backup and from its raw image. The
machine and the image are the same; only the disk differs."""

from __future__ import annotations

from bench.support import images
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.servers import nbdkit_file
from bench.support.setting import Setting
from tests.support.guest import Guest, GuestError, kvm_works, nbd_disk, raw_disk

SUMMARY = "boot of the guest from its backup and from its raw image"

_RAW = "raw file"
_NBDKIT = "nbdkit file"
_TITLE = "boot to the login prompt"
_LIMIT_S = 300.0


def boot_s(setting: Setting, disk: list[str]) -> float:
    """QEMU's start to the login prompt, in seconds."""
    try:
        with Guest([disk], log=setting.work / "console.log") as guest:
            return guest.wait_for_login(timeout=_LIMIT_S)
    except GuestError as error:
        raise Failure(f"the guest did not boot: {error}") from error


def measure(setting: Setting) -> None:
    disk = setting.guest()
    folder = setting.folder("boot")
    copy = folder / "guest.raw"
    turn = 0

    def from_raw() -> dict[str, float]:
        images.sparse_copy(disk, copy)
        settle(setting.work)
        return {_TITLE: boot_s(setting, raw_disk(copy))}

    def from_nbdkit() -> dict[str, float]:
        images.sparse_copy(disk, copy)
        settle(setting.work)
        with nbdkit_file(copy, setting.socket("nbdkit")) as server:
            return {_TITLE: boot_s(setting, nbd_disk(server.uri()))}

    def from_backup() -> dict[str, float]:
        nonlocal turn
        turn += 1
        coldrise = setting.coldrise(disk)
        session = f"boot{turn}"
        coldrise.publish(disk.name, session)
        settle(setting.work)
        with coldrise.serve(setting.socket("coldrise")) as server:
            took_s = boot_s(setting, nbd_disk(server.uri(f"live/{session}/vda")))
        coldrise.discard(session)
        return {_TITLE: took_s}

    results = setting.race(
        "boot", {COLDRISE: from_backup, _RAW: from_raw, _NBDKIT: from_nbdkit}, setting.sizes.few_rounds
    )
    accelerator = "KVM" if kvm_works() else "emulation (no KVM here)"
    setting.add(
        Row("boot", _TITLE, disk.name, "s", column(results, _TITLE), [Target(_RAW, at_most=1.05)], "",
            f"QEMU, {accelerator}, 2 CPUs, 1 GiB; QEMU's start to the prompt on the serial console")
    )
    images.removed(folder)

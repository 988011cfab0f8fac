"""Boots the guest over NFS, over NBD and from its raw image, and runs a load of small
transactions in it. The machine is the same every time; only the disk differs. The limit of NFS
beside NBD is Ganesha's own FSAL_VFS on the raw image."""

from __future__ import annotations

import json

from bench.support import images, nfs
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Failure, Row, Target, column
from bench.support.setting import Setting
from tests.support.guest import Guest, GuestError, kvm_works, nbd_disk, nfs_disk, raw_disk

SUMMARY = "boot of the guest and small transactions in it, over NFS and over NBD"

_NBD = "coldrise over NBD"
_NFS = "coldrise over NFS"
_RAW = "raw file"
_VFS = "Ganesha FSAL_VFS on the raw file"
_BOOT = "boot to the login prompt"
_TRANSACTIONS = "4 jobs of write 8K + fsync in the guest"
_LIMIT_S = 300.0


def _command(seconds: int) -> str:
    return (
        "fio --name=transactions --directory=/root --ioengine=psync --rw=randrw --rwmixread=50 --bs=8k"
        f" --size=64M --numjobs=4 --fsync=1 --time_based --runtime={seconds} --group_reporting"
        " --randrepeat=1 --output-format=json"
    )


def _run(setting: Setting, disk: list[str], prefix=()) -> dict[str, float]:
    try:
        with Guest([disk], log=setting.work / "console.log", prefix=prefix) as guest:
            boot_s = guest.wait_for_login(timeout=_LIMIT_S)
            guest.login()
            said = guest.check(_command(4 * setting.sizes.seconds), timeout=_LIMIT_S)
            guest.poweroff()
    except GuestError as error:
        raise Failure(f"the guest: {error}") from error
    job = json.loads(said[said.index("{"):])["jobs"][0]
    return {_BOOT: boot_s, _TRANSACTIONS: job["write"]["iops"]}


def measure(setting: Setting) -> None:
    disk = setting.guest()
    folder = setting.folder("guest")
    copy = folder / "guest.raw"
    turn = 0

    def session() -> tuple[str, object]:
        nonlocal turn
        turn += 1
        coldrise = setting.coldrise(disk)
        coldrise.publish(disk.name, f"guest{turn}")
        settle(setting.work)
        return f"guest{turn}", coldrise

    def over_nfs() -> dict[str, float]:
        name, coldrise = session()
        with nfs.coldrise_nfs(setting, coldrise) as server:
            path = f"{server.export}/live/{name}/vda.raw"
            sample = _run(setting, nfs_disk(path), server.network.command())
        coldrise.discard(name)
        return sample

    def over_nbd() -> dict[str, float]:
        name, coldrise = session()
        with coldrise.serve(setting.socket("coldrise")) as server:
            sample = _run(setting, nbd_disk(server.uri(f"live/{name}/vda")))
        coldrise.discard(name)
        return sample

    def copied() -> None:
        images.sparse_copy(disk, copy)
        settle(setting.work)

    def from_raw() -> dict[str, float]:
        copied()
        return _run(setting, raw_disk(copy))

    def over_vfs() -> dict[str, float]:
        copied()
        with nfs.ganesha_vfs(setting, folder) as server:
            return _run(setting, nfs_disk(f"{server.export}/{copy.name}"), server.network.command())

    contestants = {_NFS: over_nfs, _NBD: over_nbd, _VFS: over_vfs, _RAW: from_raw}
    results = setting.race("guest", contestants, setting.sizes.few_rounds)
    accelerator = "KVM" if kvm_works() else "emulation (no KVM here)"
    machine = f"QEMU, {accelerator}, 2 CPUs, 1 GiB"

    def add(title: str, ours: str, against: str, unit: str, **target) -> None:
        samples = column(results, title)
        if ours in samples and against in samples:
            how = ours.removeprefix("coldrise ")
            command = _command(4 * setting.sizes.seconds) if title == _TRANSACTIONS else ""
            setting.add(
                Row("nfs_guest", f"{title}, {how}", disk.name, unit,
                    {COLDRISE: samples[ours], against: samples[against]},
                    [Target(against, **target)], command, machine)
            )

    add(_BOOT, _NFS, _NBD, "s", at_most=1.1)
    add(_TRANSACTIONS, _NFS, _NBD, "writes/s", at_least=0.95)
    add(_TRANSACTIONS, _NFS, _VFS, "writes/s", at_least=0.95)
    add(_TRANSACTIONS, _NBD, _RAW, "writes/s", at_least=0.9)
    images.removed(folder)

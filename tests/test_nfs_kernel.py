"""coldrise serve nfs: Linux's own client, in a guest."""

import os
import signal
import subprocess
import threading

import pytest

from support import guest as guests
from support.cli import ROOT
from support.image import Image
from support.nbdserver import wait_until

MIB = 1 << 20

# Where a guest in QEMU's user network sees this side's loopback.
HOST = "10.0.2.2"

VERSIONS = ["vers=3,nolock,proto=tcp,port=2049,mountport=20048", "vers=4.0", "vers=4.1"]


# Where in the disk each version writes what fio verifies, and where a file system.
FIRST_RANDOM_MIB, FIRST_NESTED_MIB, DISK_MIB = 200, 224, 300
# How much each version writes while the server crashes: a second's work for an emulated processor.
WRITTEN_MIB = 24


@pytest.fixture
def guest(network, tmp_path, monkeypatch):
    """A guest, booted from a file of its own, in the server's network."""
    build = subprocess.run([ROOT / "images/guest/build.sh", tmp_path / "guest.raw"],
                           stdout=subprocess.DEVNULL, check=False, timeout=900)  # fmt: skip
    assert build.returncode == 0
    inside = tmp_path / "qemu"
    command = network.command(guests.QEMU)
    inside.write_text("#!/bin/sh\nexec " + " ".join(command) + ' "$@"\n', encoding="utf-8")
    inside.chmod(0o755)
    monkeypatch.setattr(guests, "QEMU", str(inside))
    disk = guests.raw_disk(tmp_path / "guest.raw")
    with guests.Guest([disk], log=tmp_path / "guest.log", network=True, cpus=1) as guest:
        guest.wait_for_login()
        guest.login()
        # By this mount finds TCP; the guest has no package that brings it.
        guest.check("printf 'tcp 6 TCP\\nudp 17 UDP\\n' > /etc/protocols; mkdir -p /mnt/n")
        yield guest
        guest.poweroff()


def refused(guest, command):
    code, output = guest.run(command)
    assert code != 0, f"{command} was allowed"
    return output


def check_files(guest, session):
    """Ordinary files, through the kernel's cache and its own ways of creating."""
    work = f"{session}/work"
    guest.check(f"mkdir -p {work}/inner && cp -r /etc/pam.d {work}/inner/copy", timeout=120)
    guest.check("echo 3 > /proc/sys/vm/drop_caches")
    guest.check(f"diff -r /etc/pam.d {work}/inner/copy", timeout=120)
    # Exclusive: of two only one makes it.
    guest.check(f"set -C; echo 1 > {work}/lock; ! echo 2 > {work}/lock; grep 1 {work}/lock")
    guest.check(f"flock -n {session}/trial.vmx true")
    guest.check(f"echo new > {work}/a~ && mv {work}/a~ {work}/a && grep new {work}/a")
    guest.check(f"exec 9> {work}/open; rm {work}/open; echo late >&9; exec 9>&-")
    guest.check(f"dd if=/root/written of={work}/large bs=1M count=3 && truncate -s 5 {work}/large")
    assert guest.check(f"stat -c %s {work}/large").strip() == "5"
    guest.check(f"head -c 5 /root/written | cmp - {work}/large && rm -r {work}")
    assert guest.check(f"ls {session} | grep -v vda").split() == ["trial.vmx"]


def check_random_writes(guest, disk, start_mib, is_proof):
    """fio writes, and finds all of it after its cache was dropped. `is_proof`: and finds a changed byte."""
    job = (
        f"fio --name=verified --filename={disk} --offset={start_mib}M --size=8M --rw=randwrite"
        " --bsrange=4k-64k --ioengine=psync --fsync=4 --verify=crc32c --verify_fatal=1"
    )
    guest.check(f"{job} --do_verify=0 >/dev/null", timeout=200)
    guest.check("echo 3 > /proc/sys/vm/drop_caches")
    guest.check(f"{job} --verify_only=1 >/dev/null", timeout=200)
    if not is_proof:
        return
    # It can fail: one byte of it is another one.
    damage = f"printf X | dd of={disk} bs=1 seek={start_mib}M conv=notrunc,fsync"
    guest.check(f"dd if={disk} bs=1 count=1 skip={start_mib}M of=/root/byte")
    guest.check(damage)
    code, _ = guest.run(f"{job} --verify_only=1 >/dev/null 2>&1", timeout=200)
    assert code != 0, "fio has verified nothing"
    guest.check(f"dd if=/root/byte of={disk} bs=1 seek={start_mib}M conv=notrunc,fsync")


def check_nested(guest, disk, start_mib):
    """A file system in the disk, mounted where the disk is mounted."""
    attach = f"d=$(losetup -f --show -o $(({start_mib} << 20)) --sizelimit $((24 << 20)) {disk})"
    guest.check("mkdir -p /mnt/d; modprobe loop")
    guest.check(
        f"{attach} && mkfs.ext4 -q $d && mount $d /mnt/d && cp -r /etc /mnt/d/copy && umount /mnt/d"
        " && fsck.ext4 -f -n $d && losetup -d $d",
        timeout=300,
    )
    guest.check("echo 3 > /proc/sys/vm/drop_caches")
    guest.check(
        f"{attach} && fsck.ext4 -f -n $d && mount -o ro $d /mnt/d && diff -r --no-dereference /etc /mnt/d/copy"
        " && umount /mnt/d && losetup -d $d",
        timeout=300,
    )


def test_linux_mounts_every_version_and_survives_crashes(coldrise, nfs, guest, tmp_path):
    image = Image(DISK_MIB * MIB)
    image.fill(0, MIB, "stored")
    address = coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))
    coldrise.publish(address, "trial")
    server = nfs()
    guest.check(f"head -c {WRITTEN_MIB}M /dev/urandom > /root/written", timeout=120)
    disk = "/mnt/n/live/trial/vda.raw"
    for number, version in enumerate(VERSIONS):
        guest.check(f"mount -t nfs -o {version} {HOST}:/coldrise /mnt/n")
        assert guest.check("ls /mnt/n").split() == ["live", "web01"]
        stored = guest.check("head -c 1M /mnt/n/web01/latest/vda.raw | sha256sum")
        assert stored == guest.check(f"head -c 1M {disk} | sha256sum")
        check_files(guest, "/mnt/n/live/trial")
        assert "Permission denied" in refused(guest, "touch /mnt/n/live/new 2>&1")
        point = "/mnt/n/web01/latest/vda.raw"
        write = f"dd if=/root/written of={point} bs=4k count=1 conv=notrunc,fsync 2>&1"
        assert "Read-only" in refused(guest, write)
        assert "not permitted" in refused(guest, f"truncate -s 1M {disk} 2>&1")

        # Crashes during the write: nothing is lost, and no client gets an error.
        before = server.ganesha()
        crash = threading.Timer(0.3, os.kill, (before, signal.SIGKILL))
        crash.start()
        start = 10 + 60 * number
        guest.check(
            f"dd if=/root/written of={disk} bs=1M seek={start} conv=notrunc,fsync", timeout=200
        )
        crash.join()
        wait_until(lambda: server.ganesha() != before, "another nfs-ganesha")
        guest.check("echo 3 > /proc/sys/vm/drop_caches")
        guest.check(
            f"dd if={disk} bs=1M skip={start} count={WRITTEN_MIB} status=none | cmp - /root/written",
            timeout=200,
        )
        check_random_writes(guest, disk, FIRST_RANDOM_MIB + 8 * number, is_proof=number == 0)
        check_nested(guest, "/mnt/n/live/trial/vda-flat.vmdk", FIRST_NESTED_MIB + 24 * number)
        guest.check("umount /mnt/n", timeout=120)
    sums = guest.check("sha256sum < /root/written").split()[0]
    sealed = coldrise.json("seal", "trial")["address"]
    target = tmp_path / "restored.raw"
    coldrise.json("restore", f"{sealed}/vda", target)
    for number in range(len(VERSIONS)):
        start = 10 + 60 * number
        part = tmp_path / "part"
        with open(target, "rb") as file:
            file.seek(start * MIB)
            part.write_bytes(file.read(WRITTEN_MIB * MIB))
        found = subprocess.run(["sha256sum", part], capture_output=True, text=True, check=True)
        assert found.stdout.split()[0] == sums, VERSIONS[number]
        nested = (FIRST_NESTED_MIB + 24 * number) * MIB
        fsck = ["fsck.ext4", "-f", "-n", f"{target}?offset={nested}"]
        assert subprocess.run(fsck, check=False).returncode == 0, VERSIONS[number]

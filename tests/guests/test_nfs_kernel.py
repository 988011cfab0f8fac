"""coldrise serve nfs: Linux's own client, in a guest. It mounts by every version concurrently."""

import hashlib
import os
import signal
import subprocess
import threading

import pytest

from support.image import Image
from support.nbdserver import wait_until
from support.snapshot import running_guest

MIB = 1 << 20
# By version. A guest in QEMU's user network sees this side's loopback at 10.0.2.2.
OPTIONS = {"3": "vers=3,nolock,proto=tcp,port=2049,mountport=20048", "4.0": "vers=4.0", "4.1": "vers=4.1"}
# Each version has three parts of the disk: for writes during the server's crash, for fio's verification, and for a file system.
WRITTEN_MIB, RANDOM_MIB, NESTED_MIB = 16, 4, 16
FIRST_WRITTEN_MIB, FIRST_RANDOM_MIB, FIRST_NESTED_MIB, DISK_MIB = 10, 60, 80, 130

# By /etc/protocols mount finds TCP; the guest has no package that brings it.
PREPARE = f"""set -e
printf 'tcp 6 TCP\\nudp 17 UDP\\n' > /etc/protocols
mkdir /mnt/d {' '.join(f'/mnt/{version}' for version in OPTIONS)}
modprobe -a loop nfsv3 nfsv4
head -c {WRITTEN_MIB}M /dev/urandom > /root/written"""

USE_FILES = """set -ex
session=/mnt/$v/live/trial work=$session/work point=/mnt/$v/web01/latest/vda.raw
refuses() { if "$@"; then echo "allowed: $*"; exit 1; fi; }
test "$(echo $(ls /mnt/$v))" = "live web01"
head -c 1M $point | sha256sum
head -c 1M $session/vda.raw | sha256sum
# Ordinary files, through the kernel's cache and its own ways of creating.
mkdir -p $work/inner
cp -r /etc/pam.d $work/inner/copy
echo 3 > /proc/sys/vm/drop_caches
diff -r /etc/pam.d $work/inner/copy
# Exclusive: of two only one makes it.
set -C
echo 1 > $work/lock
refuses eval 'echo 2 > $work/lock'
set +C
grep 1 $work/lock
flock -n $session/trial.vmx true
echo new > $work/a~
mv $work/a~ $work/a
grep new $work/a
exec 9> $work/open
rm $work/open
echo late >&9
exec 9>&-
dd if=/root/written of=$work/large bs=1M count=3
truncate -s 5 $work/large
test $(stat -c %s $work/large) = 5
head -c 5 /root/written | cmp - $work/large
rm -r $work
test "$(ls $session | grep -v vda)" = trial.vmx
touch /mnt/$v/live/new 2>&1 | grep "Permission denied"
dd if=/root/written of=$point bs=4k count=1 conv=notrunc,fsync 2>&1 | grep Read-only
truncate -s 1M $session/vda.raw 2>&1 | grep "not permitted"
"""

# Each of these functions gets the version and its offset in the disk, in MiB.
FUNCTIONS = f"""set -ex
writes() {{ dd if=/root/written of=/mnt/$1/live/trial/vda.raw bs=1M seek=$2 conv=notrunc,fsync status=none; }}
has() {{ dd if=/mnt/$1/live/trial/vda.raw bs=1M skip=$2 count={WRITTEN_MIB} status=none | cmp - /root/written; }}
# A file system in the disk, mounted where the disk is mounted.
nests() {{
    attach="losetup -f --show -o $(($2 << 20)) --sizelimit $(({NESTED_MIB} << 20)) /mnt/$1/live/trial/vda-flat.vmdk"
    d=$($attach)
    mkfs.ext4 -q $d
    mount $d /mnt/d
    cp -r /etc/systemd /mnt/d/copy
    umount /mnt/d
    losetup -d $d
    echo 3 > /proc/sys/vm/drop_caches
    d=$($attach)
    fsck.ext4 -f -n $d
    mount -o ro $d /mnt/d
    diff -r --no-dereference /etc/systemd /mnt/d/copy
    umount /mnt/d
    losetup -d $d
}}
"""


@pytest.fixture
def guest(network, tmp_path):
    """A guest in the server's network."""
    with running_guest(tmp_path, prepare=PREPARE, prefix=network.command(), network=True, memory_mib=512) as guest:
        yield guest


@pytest.fixture
def stored(coldrise, tmp_path):
    """The SHA-256 of the first MiB of a disk that is backed up and published."""
    image = Image(DISK_MIB * MIB)
    image.fill(0, MIB, "stored")
    path = image.save(tmp_path / "vda.raw")
    coldrise.publish(coldrise.backup("web01", vda=path), "trial")
    with open(path, "rb") as file:
        return hashlib.sha256(file.read(MIB)).hexdigest()


@pytest.fixture
def server(stored, guest, nfs):
    server = nfs()
    guest.check("set -ex\n" + "\n".join(f"mount -t nfs -o {options} 10.0.2.2:/coldrise /mnt/{version}"
                                        for version, options in OPTIONS.items()), timeout=180)  # fmt: skip
    yield server
    guest.check("umount " + " ".join(f"/mnt/{version}" for version in OPTIONS), timeout=120)


def for_each(function, first_mib, step_mib):
    """Calls of a function of the guest for every version."""
    return [f"{function} {version} {first_mib + step_mib * number}" for number, version in enumerate(OPTIONS)]


def test_linux_uses_files_and_harmful_operations_are_refused(server, guest, stored):
    for version in OPTIONS:
        assert guest.check(f"v={version}\n{USE_FILES}", timeout=200).count(f"{stored}  -") == 2, version


def fio(names, what):
    """fio on each version's part of the disk."""
    jobs = [f"--name={name} --filename=/mnt/{name}/live/trial/vda.raw --offset={FIRST_RANDOM_MIB + RANDOM_MIB * number}M"
            for number, name in enumerate(OPTIONS) if name in names]  # fmt: skip
    shared = (f"--size={RANDOM_MIB}M --rw=randwrite --bsrange=4k-64k --ioengine=psync --fsync=4 --verify=crc32c"
              f" --verify_fatal=1 {what}")
    return " ".join(["fio", "--output=/dev/null", *(f"{job} {shared}" for job in jobs)])


def test_linux_writes_survive_a_crash_of_the_server(coldrise, server, guest, tmp_path):
    layers = coldrise.repository / "layers"
    crashed = []

    def written():
        return sum(path.stat().st_blocks * 512 for path in layers.iterdir())

    def crash():
        before = written()
        wait_until(lambda: written() > before, "the first write")
        crashed.append(written() - before)
        os.kill(server.ganesha(), signal.SIGKILL)

    writes = for_each("writes", FIRST_WRITTEN_MIB, WRITTEN_MIB)
    nests = for_each("nests", FIRST_NESTED_MIB, NESTED_MIB)
    crash = threading.Thread(target=crash)
    crash.start()
    # No client gets an error, nothing is lost. A grace period follows a crash: meanwhile version 3 does its other work.
    guest.check("\n".join([
        FUNCTIONS, "jobs=", *(f"{write} & jobs+=\" $!\"" for write in writes), "for job in $jobs; do wait $job; done",
        "echo 3 > /proc/sys/vm/drop_caches", "jobs=",
        *(f"{write} & jobs+=\" $!\"" for write in for_each("has", FIRST_WRITTEN_MIB, WRITTEN_MIB)),
        nests[0], "for job in $jobs; do wait $job; done", *nests[1:]]), timeout=300)  # fmt: skip
    crash.join()
    assert 0 < crashed[0] < len(OPTIONS) * WRITTEN_MIB * MIB
    sums = guest.check("sha256sum < /root/written").split()[0]

    damage = f"of=/mnt/3/live/trial/vda.raw bs=1 seek={FIRST_RANDOM_MIB}M conv=notrunc,fsync status=none"
    drop, verify = "echo 3 > /proc/sys/vm/drop_caches", "--verify_only=1"
    guest.check("\n".join([
        "set -ex", fio(OPTIONS, "--do_verify=0"), drop, fio(OPTIONS, verify), drop,
        # It can fail: one byte of it is another one.
        f"dd if=/mnt/3/live/trial/vda.raw bs=1 count=1 skip={FIRST_RANDOM_MIB}M of=/root/byte status=none",
        f"printf X | dd {damage}", f"if {fio(['3'], verify)}; then echo fio has verified nothing; exit 1; fi",
        f"dd if=/root/byte {damage}"]), timeout=300)  # fmt: skip

    sealed = coldrise.json("seal", "trial")["address"]
    target = tmp_path / "restored.raw"
    coldrise.json("restore", f"{sealed}/vda", target)
    with open(target, "rb") as file:
        for number, version in enumerate(OPTIONS):
            file.seek((FIRST_WRITTEN_MIB + WRITTEN_MIB * number) * MIB)
            assert hashlib.sha256(file.read(WRITTEN_MIB * MIB)).hexdigest() == sums, version
            nested = (FIRST_NESTED_MIB + NESTED_MIB * number) * MIB
            fsck = ["fsck.ext4", "-f", "-n", f"{target}?offset={nested}"]
            assert subprocess.run(fsck, check=False).returncode == 0, version

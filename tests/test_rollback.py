"""coldrise rollback: only differences are written, despite any interruption."""

import contextlib
import hashlib
import os
import random
import signal

import nbd
import pytest

from support.block_device import mounted_apart
from support.image import Image
from support.nbdserver import wait_until
from support.sources import tool
from support.targets import qemu_nbd, served

MIB = 1 << 20
BLOCK = 4096


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def points(coldrise):
    return [point["point"] for machine in coldrise.json("list")["machines"] for point in machine["points"]]


@pytest.fixture
def disk(coldrise, tmp_path):
    """A raw disk of 32 MiB, stored as a point and then changed: 12 KiB in two ranges and 256 KiB that were
    zero. Returns its path, the point and the digest of the point's state."""
    image = Image(32 * MIB)
    image.fill(0, 8 * MIB, "rollback")
    path = image.save(tmp_path / "disk.raw")
    address = coldrise.backup("web01", vda=path)
    state = digest(path)
    change(path)
    return path, address, state


def change(path):
    with open(path, "r+b") as file:
        for offset, length in ((3 * MIB, 2 * BLOCK), (5 * MIB + BLOCK, BLOCK), (20 * MIB, 64 * BLOCK)):
            file.seek(offset)
            file.write(b"\xa5" * length)


def test_only_differences_are_written_and_can_be_undone(coldrise, disk):
    path, address, state = disk
    changed, blocks = digest(path), path.stat().st_blocks
    done = coldrise.json("rollback", address, "--onto", path)
    assert digest(path) == state
    (one,) = done["disks"]
    assert (one["method"], one["differing_bytes"], one["range_count"]) == ("points", 67 * BLOCK, 3)
    assert one["zeroed_bytes"] == 64 * BLOCK and path.stat().st_blocks < blocks
    assert 3 * BLOCK <= one["verified_bytes"] <= one["compared_bytes"] < MIB
    undone = coldrise.json("rollback", done["safety_point"], "--onto", path)
    assert digest(path) == changed and undone["differing_bytes"] == 67 * BLOCK


def test_a_dry_run_writes_nothing(coldrise, disk, tmp_path):
    path, address, _ = disk
    coldrise.runs = tmp_path / "runs"
    before = digest(path), path.stat().st_mtime_ns, points(coldrise)
    done = coldrise.json("rollback", address, "--onto", path, "--dry-run")
    (one,) = done["disks"]
    assert (one["method"], one["differing_bytes"], one["range_count"]) == ("compare", 67 * BLOCK, 3)
    assert done["safety_point"] is None
    assert before == (digest(path), path.stat().st_mtime_ns, points(coldrise))
    shown = coldrise.run("rollback", address, "--onto", path, "--dry-run").stdout
    assert "would write 268.0 KiB in 3 ranges" in shown
    other = tmp_path / "other.raw"
    other.write_bytes(b"short")
    assert coldrise.run("rollback", address, "--onto", other, "--dry-run").returncode == 2
    assert "a rollback" not in coldrise.run("doctor").stdout


def test_a_short_last_block_and_no_safety_point(coldrise, image, point, tmp_path):
    path = tmp_path / "vda.raw"
    state, names = digest(path), points(coldrise)
    with open(path, "r+b") as file:
        file.seek(8 * MIB + 100)
        file.write(b"end")
    done = coldrise.json("rollback", point, "--onto", path, "--no-safety-point", "--verify")
    (one,) = done["disks"]
    assert digest(path) == state and len(image) == path.stat().st_size
    assert (one["differing_bytes"], points(coldrise)) == (512, names)


def test_several_disks_form_one_consistent_state(coldrise, tmp_path):
    paths = {}
    for name in ("vda", "vdb"):
        image = Image(4 * MIB)
        image.fill(0, MIB, name)
        paths[name] = image.save(tmp_path / f"{name}.raw")
    address = coldrise.backup("web01", **paths)
    states = {name: digest(path) for name, path in paths.items()}
    for path in paths.values():
        with open(path, "r+b") as file:
            file.seek(2 * MIB)
            file.write(b"new")
    targets = [f"{name}={path}" for name, path in paths.items()]
    assert "vda=TARGET" in coldrise.run("rollback", address, "--onto", paths["vda"]).stderr.replace("DISK", "vda")
    same = coldrise.run("rollback", address, targets[0], f"vdb={paths['vda']}")
    assert same.returncode == 2 and "target of two disks" in same.stderr
    done = coldrise.json("rollback", address, *targets)
    assert {name: digest(path) for name, path in paths.items()} == states
    shown = coldrise.json("show", done["safety_point"])
    assert [disk["disk"] for disk in shown["disks"]] == ["vda", "vdb"]


@contextlib.contextmanager
def with_bitmap(coldrise, tmp_path):
    """A qcow2 disk of 64 MiB under qemu-nbd, stored, with a bitmap from that point on, and then changed."""
    qcow2, raw = tmp_path / "disk.qcow2", tmp_path / "state.raw"
    image = Image(64 * MIB)
    image.fill(0, 32 * MIB, "bitmap")
    image.save(raw)
    tool("qemu-img", "convert", "-f", "raw", "-O", "qcow2", raw, qcow2)
    address = coldrise.json("backup", "web01", f"vda={qcow2}")["address"]
    since = address.split("/")[1]
    bitmap = f"coldrise-{since}"
    tool("qemu-img", "bitmap", "--add", qcow2, bitmap)
    tool("qemu-io", "-f", "qcow2", "-c", "write -P 7 9M 128k", "-c", "write -P 8 50M 4k", qcow2)
    with qemu_nbd(tmp_path, qcow2, "-B", bitmap) as uri:
        yield uri, address, since, bitmap, bytes(image.content)


def content(uri):
    handle = nbd.NBD()
    handle.connect_uri(uri)
    read = b"".join(bytes(handle.pread(MIB, at)) for at in range(0, handle.get_size(), MIB))
    handle.shutdown()
    return read


@pytest.mark.parametrize("safety", [True, False])
def test_with_a_bitmap_only_changes_are_read(coldrise, tmp_path, safety):
    with with_bitmap(coldrise, tmp_path) as (uri, address, since, _, state):
        options = [] if safety else ["--no-safety-point"]
        done = coldrise.json("rollback", address, "--onto", uri, "--since", since, *options)
        (one,) = done["disks"]
        assert content(uri) == state
        assert (one["method"], one["differing_bytes"]) == ("points" if safety else "bitmap", 132 << 10)
        assert one["compared_bytes"] < MIB
        # Again: with a bitmap that no longer counts from the last backup, everything is read, correctly.
        again = coldrise.json("rollback", address, "--onto", uri, "--since", since, *options)
        assert again["differing_bytes"] == 0 and bool(again["remarks"]) == safety


def test_a_bitmap_of_another_point_is_ignored(coldrise, tmp_path):
    with with_bitmap(coldrise, tmp_path) as (uri, address, since, _, _):
        before = content(uri)
        later = coldrise.json("backup", "web01", f"vda={uri}")["point"]
        for options, reason in [
            (("--since", later), "no dirty bitmap"),
            (("--since", later, "--bitmap", f"coldrise-{since}"), "another point"),
            (("--since", since, "--bitmap", "daily"), "cannot be trusted"),
            (("--since", since, "--bitmap", f"coldrise-00000000/web01/vda/{since}"), "another disk"),
            (("--bitmap", "daily"), "--since"),
        ]:
            done = coldrise.run("rollback", address, "--onto", uri, *options)
            assert done.returncode in (1, 2) and reason in done.stderr, done.stderr
        assert content(uri) == before


def test_a_killed_rollback_is_finished_by_the_next(coldrise, tmp_path):
    """Kills at random requests: while the state before is stored, and while 16 MiB are written. Each block is old or new, and the
    next run finishes."""
    old, new = Image(16 * MIB), Image(16 * MIB)
    old.fill(0, 16 * MIB, "old")
    new.fill(0, 16 * MIB, "new")
    path = new.save(tmp_path / "disk.raw")
    address = coldrise.backup("web01", vda=path)
    coldrise.runs = tmp_path / "runs"
    mixed = 0
    log = tmp_path / "log"
    target = ("--filter=log", "--filter=delay", "file", path, f"logfile={log}", "delay-write=60ms")
    for number in range(6):
        old.save(path)
        before = points(coldrise)
        request, count = ("Read", 20) if number < 3 else ("Write", 4)
        count = random.Random(number).randint(1, count)
        options = ["--no-safety-point"] * (number % 2)
        # Each has a server of its own: one that has ended no longer writes requests from before the kill.
        with served(tmp_path, *target) as uri:
            process = coldrise.start("--quiet", "rollback", address, "--onto", uri, *options)
            wait_until(lambda log=log, word=f" {request} id=", count=count, process=process:
                       log.read_text(encoding="utf-8").count(word) >= count or process.poll() is not None, "the requests")
            process.send_signal(signal.SIGKILL)
            process.wait()
        found = path.read_bytes()
        for at in range(0, len(found), BLOCK):
            assert found[at : at + BLOCK] in (old.read(at, BLOCK), new.read(at, BLOCK))
        if not options and points(coldrise) == before:
            assert found == bytes(old.content), "written before the safety point was stored"
        mixed += found != bytes(old.content) and found != bytes(new.content)
    with served(tmp_path, *target) as uri:
        output = coldrise.run("doctor").stdout
        assert output.count(f"a rollback to {address}") == 1 and f"{uri} may have parts of two states" in output, output
        safe = coldrise.json("rollback", address, "--onto", uri)
        assert path.read_bytes() == bytes(new.content)
        assert "parts of two states" not in coldrise.run("doctor").stdout
    assert mixed >= 2, "no kill hit a rollback that was writing"
    # The mixture itself was stored before it was repaired.
    coldrise.json("restore", safe["safety_point"], tmp_path / "mixture.raw")
    assert (tmp_path / "mixture.raw").read_bytes() == found


def test_a_failed_target_is_reported_as_mixed_content(coldrise, disk, tmp_path):
    path, address, state = disk
    trigger = tmp_path / "fail"
    trigger.touch()
    words = ("--filter=error", "file", path, "error=EIO", "error-pwrite-rate=100%",
             "error-zero-rate=100%", f"error-file={trigger}")
    coldrise.runs = tmp_path / "runs"
    with served(tmp_path, *words) as uri:
        done = coldrise.run("rollback", address, "--onto", uri)
        assert done.returncode == 1 and "mixture" in done.stderr and "the state before is" in done.stderr
        assert address in done.stderr
        assert f"{uri} may have parts of two states" in coldrise.run("doctor").stdout
        trigger.unlink()
        coldrise.json("rollback", address, "--onto", uri, "--no-safety-point")
        assert "parts of two states" not in coldrise.run("doctor").stdout
    assert digest(path) == state


def test_a_full_target(coldrise, tmp_path):
    """A sparse file on a full file system: the error names this, and free space lets it finish."""
    image = Image(16 * MIB)
    image.fill(0, 16 * MIB, "large")
    address = coldrise.backup("web01", vda=image.save(tmp_path / "large.raw"))
    small = tmp_path / "small"
    small.mkdir()
    tool("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", small)
    try:
        target = small / "disk.raw"
        with open(target, "wb") as file:
            file.truncate(16 * MIB)
        done = coldrise.run("rollback", address, "--onto", target, "--no-safety-point")
        assert done.returncode == 1 and "No space" in done.stderr and "mixture" in done.stderr
        tool("mount", "-o", "remount,size=32m", small)
        coldrise.json("rollback", address, "--onto", target, "--no-safety-point")
        assert target.read_bytes() == bytes(image.content)
    finally:
        tool("umount", small)


def test_a_disk_in_use_or_of_another_size_is_refused(coldrise, disk, tmp_path):
    path, address, _ = disk
    coldrise.runs = tmp_path / "runs"
    before = digest(path), points(coldrise)
    with qemu_nbd(tmp_path, path, driver="raw"):
        used = coldrise.run("rollback", address, "--onto", path)
        assert used.returncode == 11 and "open in QEMU" in used.stderr, used.stderr
    with served(tmp_path, "--readonly", "file", path) as uri:
        closed = coldrise.run("rollback", address, "--onto", uri)
        assert closed.returncode == 1 and "read-only" in closed.stderr
    other = tmp_path / "other.raw"
    with open(other, "wb") as file:
        file.truncate(32 * MIB + 512)
    for target, code, reason in [
        (other, 2, "33554944 bytes"),
        (tmp_path / "absent.raw", 1, "absent"),
        (tmp_path / "disk.qcow2", 2, "qemu-nbd"),
        (coldrise.repository / "disk.raw", 2, "folder of the repository"),
    ]:
        done = coldrise.run("rollback", address, "--onto", target)
        assert done.returncode == code and reason in done.stderr, done.stderr
    assert (digest(path), points(coldrise)) == before
    coldrise.json("rollback", address, "--onto", path, "--dry-run")
    assert "a rollback" not in coldrise.run("doctor").stdout


def test_devices(coldrise, disk, tmp_path):
    """A loop device: mounted it is refused, and the file behind it, too; else it is rolled back."""
    path, address, state = disk
    device = tool("losetup", "--find", "--show", path).strip()
    try:
        behind = coldrise.run("rollback", address, "--onto", path)
        assert behind.returncode == 11 and device in behind.stderr
        done = coldrise.json("rollback", address, "--onto", device)
        assert done["differing_bytes"] == 67 * BLOCK and digest(path) == state
        tool("mkfs.ext4", "-q", device)
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        with mounted_apart(device, mounted):
            used = coldrise.run("rollback", address, "--onto", device)
            assert used.returncode == 11 and "mounted" in used.stderr
        coldrise.json("rollback", address, "--onto", device, "--no-safety-point")
        os.sync()
        assert digest(path) == state
    finally:
        tool("losetup", "--detach", device)

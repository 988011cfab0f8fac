"""coldrise backup --from libvirt: domains that are off, or are started meanwhile."""

import os
import shutil
import signal
import subprocess

import pytest

from support.block_device import block_device
from support.nbdserver import wait_until
from support.off import assert_same, bitmaps, write
from support.running import MIB, SIZE, assert_same_as_now
from support.sources import RunningBackup, tool
from support.virsh import changed_virsh


@pytest.fixture
def off(domain):
    """A domain that is off and has 20 MiB of content."""
    def make(name="web01", **options):
        made = domain(name, persistent=True, **options)
        made.write("vda", "write -P 17 0 20M")
        made.end()
        return made

    return make


@pytest.fixture
def start(coldrise, libvirt, scratch):
    """Starts a backup that reads slowly."""
    def begin(rate="8M"):
        return RunningBackup(coldrise, "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch,
                             "--rate", rate)

    return begin


def assert_counts_on(made, base, machine):
    """Whether a point counts from another one, and is the only one from which bitmaps count."""
    assert [disk["base"] for disk in made["disks"]] == [base["point"]] * 2
    assert all(disk["is_incremental"] for disk in made["disks"])
    assert all([name.endswith(made["point"]) for name in bitmaps(machine, disk)] == [True] for disk in machine.images)


def test_only_what_changed_is_read(coldrise, off, live, tmp_path):
    machine = off()
    full = live("--push", "--quiesce")
    assert full["instant"]["is_off"] and full["instant"]["remarks"] == [] and not full["is_unchanged"]
    assert not any(disk["is_incremental"] for disk in full["disks"])
    assert_same(coldrise, full, machine, tmp_path)
    assert "<name>web01</name>" in coldrise.json("show", full["address"])["configuration"]["text"]
    same = live()
    assert_counts_on(same, full, machine)
    assert same["is_unchanged"] and [disk["read_bytes"] for disk in same["disks"]] == [0, 0]
    write(machine, "vda", "write -P 18 8M 64k")
    write(machine, "vdb", "write -z 1M 64k")
    part = live()
    assert_counts_on(part, same, machine)
    assert not part["is_unchanged"] and part["disks"][0]["read_bytes"] == 65536
    assert_same(coldrise, part, machine, tmp_path)


def test_points_of_a_domain_count_on_whether_it_runs_or_not(coldrise, libvirt, off, live, tmp_path):
    machine = off()
    last, was_running = live(), False
    for number, is_running in enumerate([True, True, False, False, True, False, True], 1):
        # Written in the state in which the point before was made.
        if was_running:
            machine.write("vdb", f"write -P {number} {number}M 64k")
        else:
            write(machine, "vdb", f"write -P {number} {number}M 64k")
        if is_running and not was_running:
            libvirt.virsh("start", "web01", "--paused")
        elif was_running and not is_running:
            machine.end()
        if is_running:
            machine.write("vda", f"write -P {number} {number}M 64k")
        else:
            write(machine, "vda", f"write -P {number} {number}M 64k")
        made = live()
        assert made["instant"]["is_off"] == (not is_running) and made["instant"]["remarks"] == []
        assert [disk["read_bytes"] for disk in made["disks"]] == [65536, 65536], number
        assert [disk["base"] for disk in made["disks"]] == [last["point"]] * 2
        if is_running:
            assert_same_as_now(coldrise, made["address"], machine, tmp_path)
            assert [name.endswith(made["point"]) for name in machine.checkpoints()] == [True]
        else:
            assert_counts_on(made, last, machine)
            assert_same(coldrise, made, machine, tmp_path)
        last, was_running = made, is_running


def test_a_start_is_not_hindered_and_the_running_domain_is_backed_up(coldrise, libvirt, off, start, live, tmp_path):
    machine = off()
    first = live()
    write(machine, "vda", "write -P 19 0 20M")
    backup = start()
    libvirt.virsh("start", "web01", "--paused")
    machine.write("vda", "write -P 20 0 4M")
    code, made, messages = backup.end()
    assert code == 0 and "starts again" in messages, messages
    assert not made["instant"]["is_off"] and made["disks"][0]["base"] == first["point"]
    assert_same_as_now(coldrise, made["address"], machine, tmp_path)
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 2
    assert [name.endswith(made["point"]) for name in machine.checkpoints()] == [True]
    machine.end()
    last = live()
    assert last["is_unchanged"]
    assert_counts_on(last, made, machine)


@pytest.mark.parametrize("kind", ["raw", "qcow2"])
def test_a_write_while_the_images_are_read_is_not_stored_in_part(coldrise, off, start, tmp_path, kind):
    machine = off(image_format=kind)
    backup = start()
    write(machine, "vdb", "write -P 21 0 64k")
    write(machine, "vda", "write -P 21 19M 64k")
    code, made, messages = backup.end()
    assert code == 0 and "starts again" in messages, messages
    assert made["instant"]["is_off"]
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 1
    assert_same(coldrise, made, machine, tmp_path)


def remove_bitmap(machine):
    for disk, image in machine.images.items():
        tool("qemu-img", "bitmap", "--remove", image, *bitmaps(machine, disk))


def kill_qemu(machine):
    machine.libvirt.virsh("start", "web01", "--paused")
    machine.write("vda", "write -P 22 3M 64k")
    machine.write("vda", "flush")
    os.kill(machine.process(), signal.SIGKILL)
    wait_until(lambda: machine.libvirt.state("web01").startswith("shut off"), "the end of the domain")


def put_old_copy_back(machine):
    for disk, image in machine.images.items():
        shutil.copy(f"{image}.old", image)


@pytest.mark.parametrize("damage", [remove_bitmap, kill_qemu, put_old_copy_back])
def test_a_bitmap_that_may_miss_changes_is_not_believed(coldrise, off, live, tmp_path, damage):
    machine = off()
    live()
    for image in machine.images.values():
        shutil.copy(image, f"{image}.old")
    write(machine, "vda", "write -P 23 5M 64k")
    last = live()
    damage(machine)
    made = live()
    assert made["instant"]["is_off"] and not made["disks"][0]["is_incremental"]
    assert f"vda: no checkpoint counts from web01/{last['point']}: everything is read" in made["instant"]["remarks"]
    assert_same(coldrise, made, machine, tmp_path)
    assert_counts_on(live(), made, machine)


def test_a_disk_that_has_grown_is_read_behind_its_old_end(coldrise, off, live, tmp_path):
    machine = off()
    full = live()
    tool("qemu-img", "resize", "-q", machine.images["vda"], "+1M")
    write(machine, "vda", "write -P 24 64M 1M")
    made = live()
    assert_counts_on(made, full, machine)
    assert made["disks"][0]["read_bytes"] == MIB
    assert_same(coldrise, made, machine, tmp_path)


def test_a_kill_at_each_step_loses_no_change(coldrise, libvirt, off, start, live, scratch, tmp_path):
    machine = off()
    last = live()
    # libvirt is asked whether the domain is off: to find it, when the bitmaps are added, when all is read.
    for step in (2, 3):
        write(machine, "vda", f"write -P {step} {step}M 64k")
        count = tmp_path / f"count{step}"
        kill = (f"case \"$*\" in *'list --name --uuid') echo >> {count}; "
                f"if [ $(wc -l < {count}) = {step} ]; then kill -9 $PPID; exit 1; fi;; esac")
        with changed_virsh(tmp_path, kill):
            killed = coldrise.run("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
        assert killed.returncode == -signal.SIGKILL
        assert len(bitmaps(machine)) == 2
        write(machine, "vdb", f"write -P {step} {step}M 64k")
        made = live()
        assert_counts_on(made, last, machine)
        assert_same(coldrise, made, machine, tmp_path)
        last = made
    # While it reads; then the domain is started, and libvirt does not know the bitmap that is left.
    write(machine, "vda", "write -P 7 0 20M")
    code, _, _ = start().end(signal.SIGKILL)
    assert code == -signal.SIGKILL and len(bitmaps(machine)) == 2
    libvirt.virsh("start", "web01", "--paused")
    machine.write("vda", "write -P 8 1M 64k")
    made = live()
    assert made["disks"][0]["base"] == last["point"] and made["disks"][0]["is_incremental"]
    assert_same_as_now(coldrise, made["address"], machine, tmp_path)
    machine.end()
    assert [name.endswith(made["point"]) for name in bitmaps(machine)] == [True]
    # After the point was stored.
    tool("qemu-img", "bitmap", "--add", machine.images["vda"], bitmaps(machine)[0].replace(made["point"], last["point"]))
    assert_counts_on(live(), made, machine)


def test_one_backup_at_a_time(coldrise, other, libvirt, off, start, live, tmp_path):
    machine = off()
    backup = start()
    words = ["backup", "web01", "--from", "libvirt", "--connect", libvirt.uri]
    refused = other.run(*words)
    assert refused.returncode == 11 and "another process is backing up this machine" in refused.stderr
    code, made, _ = backup.end()
    assert code == 0
    # Each repository has its own bitmaps.
    write(machine, "vda", "write -P 25 0 64k")
    assert not other.json(*words)["disks"][0]["is_incremental"]
    write(machine, "vdb", "write -P 26 0 64k")
    for program, base, read in ((coldrise, made["point"], [65536, 65536]), (other, None, [0, 65536])):
        part = live(program=program)
        assert [disk["read_bytes"] for disk in part["disks"]] == read
        assert base is None or part["disks"][0]["base"] == base
        assert_same(program, part, machine, tmp_path)


def test_raw_images_and_block_devices_are_read_whole(coldrise, libvirt, off, start, live, tmp_path):
    machine = off(image_format="raw")
    for _ in range(2):
        made = live()
        assert made["disks"][0]["read_bytes"] == 20 * MIB
        assert made["instant"]["remarks"] == [f"{disk}: only qcow2 images keep checkpoints: everything is read"
                                              for disk in ("vda", "vdb")]
    assert_same(coldrise, made, machine, tmp_path)
    content = machine.images["vda"]
    with block_device(tmp_path / "device", SIZE) as device:
        tool("qemu-img", "convert", "-n", "-f", "raw", "-O", "raw", content, device)
        path = tmp_path / "block.xml"
        path.write_text(libvirt.virsh("dumpxml", "web01", "--inactive").replace(
            "<disk type='file' device='disk'>", "<disk type='block' device='disk'>", 1).replace(
            f"file='{content}'", f"dev='{device}'"), encoding="utf-8")
        libvirt.virsh("define", str(path))
        assert live()["disks"][0]["read_bytes"] == SIZE
        # No time of a device tells that it was written.
        backup = start("24M")
        tool("qemu-io", "-f", "raw", "-c", "write -P 30 50M 64k", device)
        tool("qemu-io", "-f", "raw", "-c", "write -P 30 50M 64k", content)
        code, made, messages = backup.end()
        assert code == 0 and "starts again" in messages, messages
        assert_same(coldrise, made, machine, tmp_path)


def test_backing_files_belong_to_the_disk(coldrise, libvirt, off, start, live, tmp_path):
    machine = off()
    image = machine.images["vda"]
    base = image.with_name("base.qcow2")
    image.rename(base)
    tool("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "qcow2", image)
    write(machine, "vda", "write -P 27 1M 64k")
    full = live()
    assert_same(coldrise, full, machine, tmp_path)
    write(machine, "vda", "write -P 28 2M 64k")
    part = live()
    assert part["disks"][0]["read_bytes"] == 65536 and part["disks"][0]["is_incremental"]
    assert_same(coldrise, part, machine, tmp_path)
    # A change of the backing file is noticed, too.
    remove_bitmap(machine)
    backup = start()
    tool("qemu-io", "-f", "qcow2", "-c", "write -P 29 19M 64k", base)
    code, made, messages = backup.end()
    assert code == 0 and "base.qcow2" in messages and "starts again" in messages, messages
    assert_same(coldrise, made, machine, tmp_path)


def test_unreadable_disks_are_refused_with_advice(coldrise, libvirt, off, scratch, tmp_path):
    machine = off()
    xml = libvirt.virsh("dumpxml", "web01", "--inactive")
    path = tmp_path / "network.xml"
    path.write_text(xml.replace("<disk type='file' device='disk'>", "<disk type='network' device='disk'>", 1).replace(
        f"<source file='{machine.images['vda']}'/>",
        f"<source protocol='nbd'><host transport='unix' socket='{tmp_path}/x'/></source>"), encoding="utf-8")
    libvirt.virsh("define", str(path))
    done = coldrise.run("backup", "web01", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    assert done.returncode not in (0, 101)
    assert bitmaps(machine, "vdb") == []

"""coldrise move: the disks of a running machine go to production storage."""

import json
import os
import signal
import subprocess

import pytest

from support.block_device import block_device, mounted_apart
from support.foreground import children
from support.image import Image
from support.running import BUSY_SECTOR, COUNTER_OFFSET, counter_in_use
from support.running_machine import Machine, Relay, Writer, kill
from support.nbdserver import wait_until

MIB = 1 << 20
SIZE = 24 * MIB


@pytest.fixture
def exports(coldrise, tmp_path):
    """The disks of session rescue: 8 MiB of 24 stored."""
    disks = {}
    for name in ("vda", "vdb"):
        disk = Image(SIZE)
        disk.fill(8 * MIB, 8 * MIB, name)
        disks[name] = disk.save(tmp_path / f"{name}.raw")
    return coldrise.publish(coldrise.backup("web01", **disks), "rescue")


@pytest.fixture
def machine(nbdkit, exports, own_tmp):
    """QEMU on the session."""
    server = nbdkit()
    with Machine(own_tmp / "machine", server.socket, exports) as machine:
        machine.server = server
        yield machine


@pytest.fixture
def targets(tmp_path):
    folder = tmp_path / "production"
    folder.mkdir()
    return {"vda": folder / "vda.qcow2", "vdb": folder / "vdb.img"}


def words(targets):
    return [f"{disk}={path}" for disk, path in targets.items()]


def counters(coldrise, address, folder):
    """Those of both disks of a point or session."""
    found = []
    for disk in ("vda", "vdb"):
        path = folder / "restored.raw"
        coldrise.json("restore", f"{address}/{disk}", path, "--force")
        found.append(int.from_bytes(path.read_bytes()[:512], "little"))
    return found


def sentence(coldrise):
    return coldrise.run("sessions").stdout


def start_slow_move(coldrise, machine, targets, qmp=None):
    """A move that takes as long as the test wants, after its copy has begun."""
    process = coldrise.start("move", "live/rescue", *words(targets), "--qmp", qmp or machine.qmp,
                             "--rate", "128K", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: sum(job["current-progress"] > 0 for job in machine.jobs()) == 2, "the copy")
    return process


def test_all_disks_switch_atomically_while_the_machine_writes(coldrise, machine, targets, tmp_path):
    writer = Writer(machine)
    writer.goes_on()
    done = coldrise.run("--json", "move", "live/rescue", *words(targets), "--qmp", machine.qmp)
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout.splitlines()[-1])
    writer.goes_on()
    assert moved["held_ms"] < 5000 and moved["copied_bytes"] >= 16 * MIB
    assert "Safe to cancel" in done.stderr
    assert not machine.jobs()
    assert all("/dev/fdset/" in file for file in machine.files())
    # The point is the last state before the switch, of both disks.
    first, second = counters(coldrise, moved["address"], tmp_path)
    assert 0 <= first - second <= 1 and first > 0
    machine.kill()
    last = writer.end()
    assert last <= counter_in_use(targets["vda"], 0) <= last + 1
    assert counter_in_use(targets["vdb"], 0) >= last
    # Holes stay holes.
    assert all(path.stat().st_blocks * 512 < 12 * MIB for path in targets.values())
    # Each side says where the machine is, and the old side does not start.
    assert str(targets["vda"]) in sentence(coldrise) and moved["address"] in sentence(coldrise)
    refused = coldrise.run("boot", "live/rescue")
    assert refused.returncode == 11 and str(targets["vdb"]) in refused.stderr
    assert "moved" in coldrise.run("doctor").stdout
    again = coldrise.run("move", "live/rescue", *words(targets), "--qmp", machine.qmp)
    assert again.returncode == 1 and "was moved" in again.stderr
    coldrise.json("unpublish", "rescue")
    published = coldrise.publish(moved["address"], "rescue")
    assert published and "moved" not in sentence(coldrise)


def test_the_moved_disks_have_every_byte(coldrise, machine, targets, exports):
    for disk in exports:
        handle = machine.disk(disk)
        handle.pwrite(os.urandom(3 * MIB), 7 * MIB + 512)
        handle.zero(2 * MIB, 12 * MIB)
    coldrise.json("move", "live/rescue", *words(targets), "--qmp", machine.qmp)
    machine.kill()
    for disk, path in targets.items():
        kind = "qcow2" if path.suffix == ".qcow2" else "raw"
        done = subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", kind,
                               machine.server.uri(f"live/rescue/{disk}"), path],
                              capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_block_devices_are_targets(coldrise, machine, targets, tmp_path):
    with block_device(tmp_path / "device", SIZE + 8 * MIB) as device:
        onto = {**targets, "vdb": f"raw:{device}"}

        def refused(word, code, *options):
            done = coldrise.run("move", "live/rescue", *words(onto), "--qmp", machine.qmp, *options)
            assert done.returncode == code and word in done.stderr, done.stderr
            assert not targets["vda"].exists() and not machine.jobs()

        refused("is not empty", 1)
        with block_device(tmp_path / "small", SIZE - MIB) as small:
            onto["vdb"] = small
            refused("choose a larger device", 1, "--force")
        onto["vdb"] = device
        mounted = tmp_path / "mounted"
        mounted.mkdir()
        subprocess.run(["mkfs.ext4", "-q", device], check=True)
        with mounted_apart(device, mounted):
            refused("is in use", 11, "--force")
        moved = coldrise.json("move", "live/rescue", *words(onto), "--qmp", machine.qmp, "--force")
        assert [disk["is_moved"] for disk in moved["disks"]] == [True, True]
        # The machine's disk keeps its size, although the device is larger.
        sizes = [entry["inserted"]["image"]["virtual-size"] for entry in machine.monitor.execute("query-block")]
        assert sizes == [SIZE, SIZE]
        machine.kill()
        stored = tmp_path / "stored.raw"
        coldrise.json("restore", f"{moved['address']}/vdb", stored)
        with open(device, "rb") as file:
            assert file.read(SIZE) == stored.read_bytes()


@pytest.fixture
def busy(coldrise, nbdkit, own_tmp, tmp_path):
    """A machine that writes the same places again and again, faster than a slow copy follows."""
    disks = {}
    for name in ("vda", "vdb"):
        disk = Image(SIZE)
        disk.fill(16 * MIB, MIB // 2, name)
        disks[name] = disk.save(tmp_path / f"{name}.raw")
    exports = coldrise.publish(coldrise.backup("web01", **disks), "rescue")
    server = nbdkit()
    with Machine(own_tmp / "machine", server.socket, exports, BUSY_SECTOR) as machine:
        machine.server = server

        def rounds():
            return int.from_bytes(machine.disk("vda").pread(4, COUNTER_OFFSET), "little")

        machine.rounds = rounds
        wait_until(lambda: rounds() > 50, "the guest writes")
        yield machine


# Two of those areas in a second for each disk, slower than the guest writes on the busiest host.
SLOW = "256K"


def test_a_machine_that_writes_too_fast_is_paused_for_the_rest(coldrise, busy, targets):
    done = coldrise.run("--json", "move", "live/rescue", *words(targets), "--qmp", busy.qmp, "--rate", SLOW)
    assert done.returncode == 0, done.stderr
    moved = json.loads(done.stdout.splitlines()[-1])
    assert "is paused for the last" in done.stderr and moved["held_ms"] < 10000
    assert all(disk["is_moved"] for disk in moved["disks"]) and all("/dev/fdset/" in file for file in busy.files()[-2:])
    # It runs on, and writes to the targets.
    assert busy.monitor.execute("query-status")["status"] == "running"
    before = counter_in_use(targets["vda"], COUNTER_OFFSET)
    wait_until(lambda: counter_in_use(targets["vda"], COUNTER_OFFSET) > before, "the machine goes on")


def test_a_move_killed_while_it_holds_the_machine_is_settled(coldrise, busy, targets, own_tmp):
    started = []
    path = own_tmp / "relay"
    Relay(path, busy.qmp, "block-job-set-speed", lambda: kill(started[0]), False)
    started.append(coldrise.start("move", "live/rescue", *words(targets), "--qmp", path, "--rate", SLOW,
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))
    started[0].wait(timeout=120)
    assert busy.monitor.execute("query-status")["status"] == "paused"
    coldrise.json("move", "live/rescue", "--qmp", busy.qmp)
    before = busy.rounds()
    wait_until(lambda: busy.rounds() > before, "the machine goes on in the session")
    assert not any(path.exists() for path in targets.values())


def assert_session_counts(coldrise, machine, targets, writer):
    writer.goes_on()
    assert not machine.jobs()
    assert all("live/rescue" in file for file in machine.files())
    assert not any(path.exists() for path in targets.values())
    assert "rescue" in sentence(coldrise) and "move" not in sentence(coldrise)
    nodes = machine.monitor.execute("query-named-block-nodes", flat=True)
    assert not [node["node-name"] for node in nodes if node["node-name"].startswith("coldrise")]


def test_a_full_target_leaves_the_machine_on_the_session(coldrise, machine, targets, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6M", "none", small], check=True)
    try:
        writer = Writer(machine)
        full = targets | {"vdb": small / "vdb.qcow2"}
        done = coldrise.run("--json", "move", "live/rescue", *words(full), "--qmp", machine.qmp)
        error = json.loads(done.stdout.splitlines()[-1])["error"]
        assert done.returncode == 1 and error["kind"] == "no_space", done.stderr
        assert "all writes of the machine are in the session" in done.stderr
        assert_session_counts(coldrise, machine, full, writer)
        writer.end()
    finally:
        # A machine that is not started keeps files open that it no longer uses.
        subprocess.run(["umount", "--lazy", small], check=True)


def test_a_cancelled_move_leaves_the_machine_on_the_session(coldrise, machine, targets):
    writer = Writer(machine)
    process = start_slow_move(coldrise, machine, targets)
    assert "is being moved" in sentence(coldrise)
    other = coldrise.run("move", "live/rescue", *words(targets), "--qmp", machine.qmp)
    assert other.returncode == 11 and "another coldrise move" in other.stderr
    process.send_signal(signal.SIGINT)
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 130 and "in the session" in messages, messages
    assert_session_counts(coldrise, machine, targets, writer)
    writer.end()


def test_existing_files_and_missing_disks_are_refused(coldrise, machine, targets):
    targets["vdb"].write_bytes(b"precious")
    for chosen, word in ((targets, "exists already"), ({"vda": targets["vda"]}, "vdb needs exactly one")):
        done = coldrise.run("move", "live/rescue", *words(chosen), "--qmp", machine.qmp)
        assert done.returncode in (1, 2) and word in done.stderr, done.stderr
        assert not targets["vda"].exists() and targets["vdb"].read_bytes() == b"precious"
    done = coldrise.run("move", "live/rescue", *words(targets))
    assert done.returncode == 1 and "--qmp SOCKET" in done.stderr
    moved = coldrise.json("move", "live/rescue", *words(targets), "--qmp", machine.qmp, "--force")
    assert [disk["is_moved"] for disk in moved["disks"]] == [True, True]


def test_a_killed_server_only_delays_the_move(coldrise, exports, own_tmp, targets):
    path = own_tmp / "nbd"
    serving = coldrise.start("serve", "nbd", "--socket", path, stdout=subprocess.PIPE,
                             stderr=subprocess.DEVNULL)
    assert serving.stdout.readline().startswith("ready")
    with Machine(own_tmp / "machine", path, exports) as machine:
        writer = Writer(machine)
        process = coldrise.start("move", "live/rescue", *words(targets), "--qmp", machine.qmp, "--rate",
                                 "4M", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        wait_until(lambda: sum(job["current-progress"] > 0 for job in machine.jobs()) == 2, "the copy")
        [server] = children(serving.pid)
        os.kill(server, signal.SIGKILL)
        _, messages = process.communicate(timeout=60)
        assert process.returncode == 0, messages
        writer.goes_on()
        writer.end()


def test_a_killed_machine_leaves_the_session(coldrise, machine, targets, tmp_path):
    writer = Writer(machine)
    writer.goes_on()
    process = start_slow_move(coldrise, machine, targets)
    machine.kill()
    _, messages = process.communicate(timeout=60)
    assert process.returncode == 1 and "in the session" in messages, messages
    assert not any(path.exists() for path in targets.values())
    writer.thread.join(30)
    machine.server.kill()
    assert min(counters(coldrise, "live/rescue", tmp_path)) >= writer.done
    assert "move" not in sentence(coldrise)


# The command at which the mover is killed, before or after QEMU gets it, and whether the disks switch.
STEPS = [("add-fd", True, False), ("blockdev-mirror", False, False), ("job-complete", True, False),
         ("job-finalize", False, True), ("job-finalize", True, True)]  # fmt: skip


@pytest.mark.parametrize("command, is_after, is_moved", STEPS)
def test_a_killed_move_is_settled_by_the_next(coldrise, machine, targets, own_tmp, command, is_after,
                                              is_moved):
    writer = Writer(machine)
    writer.goes_on()
    started = []
    path = own_tmp / "relay"
    Relay(path, machine.qmp, command, lambda: kill(started[0]), is_after)
    started.append(coldrise.start("move", "live/rescue", *words(targets), "--qmp", path,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    started[0].communicate(timeout=60)
    assert "interrupted" in sentence(coldrise) and "interrupted" in coldrise.run("doctor").stdout
    done = coldrise.run("--json", "move", "live/rescue", "--qmp", machine.qmp)
    if is_moved:
        assert done.returncode == 0, done.stderr
        moved = json.loads(done.stdout.splitlines()[-1])
        assert [disk["is_moved"] for disk in moved["disks"]] == [True, True]
        writer.goes_on()
        assert all("fdset" in file for file in machine.files())
        last = writer.done
        machine.kill()
        assert counter_in_use(targets["vda"], 0) >= last and counter_in_use(targets["vdb"], 0) >= last
    else:
        assert done.returncode == 0, done.stderr
        withdrawn = json.loads(done.stdout.splitlines()[-1])
        assert [disk["is_moved"] for disk in withdrawn["disks"]] == [False, False] and not withdrawn["address"]
        assert_session_counts(coldrise, machine, targets, writer)
        coldrise.json("move", "live/rescue", *words(targets), "--qmp", machine.qmp)
        writer.goes_on()
        writer.end()


def test_a_machine_killed_during_the_switch_uses_its_targets(coldrise, machine, targets, own_tmp):
    writer = Writer(machine)
    writer.goes_on()
    path = own_tmp / "relay"
    Relay(path, machine.qmp, "job-finalize", machine.kill, False)
    done = coldrise.run("move", "live/rescue", *words(targets), "--qmp", path)
    assert done.returncode == 1, done.stderr
    assert "interrupted" in sentence(coldrise)
    assert coldrise.run("boot", "live/rescue").returncode == 11
    moved = coldrise.json("move", "live/rescue")
    assert [disk["is_moved"] for disk in moved["disks"]] == [True, True] and moved["address"]
    writer.thread.join(30)
    assert counter_in_use(targets["vda"], 0) >= writer.done and counter_in_use(targets["vdb"], 0) >= writer.done


def test_the_machine_of_boot_is_found(coldrise, tmp_path):
    """Its QEMU can open no file, so it gets the target as an open one."""
    disk = tmp_path / "boot.raw"
    # jmp $
    disk.write_bytes(b"\xeb\xfe".ljust(510, b"\0") + b"\x55\xaa" + bytes(4 * MIB - 512))
    address = coldrise.backup("web01", vda=disk)
    booting = coldrise.start("boot", address, "--name", "rescue", "--memory", "32M",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: any(s["is_served"] for s in coldrise.json("sessions")["sessions"]), "the boot")
    folder = tmp_path / "production"
    folder.mkdir()
    moved = coldrise.json("move", "live/rescue", folder)
    assert moved["disks"][0]["target"] == str(folder / "web01-vda.qcow2")
    booting.send_signal(signal.SIGTERM)
    booting.communicate(timeout=60)
    compared = subprocess.run(["qemu-img", "compare", "-f", "raw", "-F", "qcow2", disk,
                               folder / "web01-vda.qcow2"], capture_output=True, check=False)
    assert compared.returncode == 0

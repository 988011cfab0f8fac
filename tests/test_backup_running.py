"""coldrise backup --from qmp: running machines, at one instant, and the leftovers of a failure."""

import contextlib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import threading

import pytest

from support.nbdserver import wait_until
from support.running import (COUNTING_SECTOR, MIB, TICKING_SECTOR, assert_one_instant, assert_same_as_now, machines,
                             restored)
from support.wallclock import BothClocks


@pytest.fixture
def machine(tmp_path):
    with machines(tmp_path) as start:
        yield start


@pytest.fixture
def live(coldrise, own_tmp):
    """Backs up a machine in its own folder of temporary files."""
    def backup(running, *options):
        return coldrise.json("backup", "web01", "--from", f"qmp:{running.monitor}", *options)

    yield backup
    assert not list(own_tmp.iterdir()), "the folders of temporary files are gone"


def failure(coldrise, running, *options):
    done = coldrise.run("backup", "web01", "--from", f"qmp:{running.monitor}", *options)
    assert done.returncode not in (0, 101), done.stdout
    return done.stderr


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_a_point_is_one_instant_of_all_disks(coldrise, machine, live, tmp_path, mode):
    running = machine(sector=COUNTING_SECTOR)
    rounds, standstills_us = [], []
    for number in range(5):
        made = live(running, *mode)
        assert [disk["is_incremental"] for disk in made["disks"]] == [number > 0] * 2
        rounds.append(assert_one_instant(*restored(coldrise, made["address"], tmp_path)))
        assert running.leftovers() == [] and len(running.bitmaps()) == 1
        if mode:
            assert made["instant"]["standstill_us"] is None
        else:
            standstills_us.append(made["instant"]["standstill_us"])
    # A busy machine may give QEMU no processor for a moment, but not each time.
    assert not standstills_us or statistics.median(standstills_us) < 1_000_000, standstills_us
    assert rounds == sorted(set(rounds)), "the guest does not run"
    assert running.status() == "running" and not running.failures.read_text()


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "incremental"])
@pytest.mark.parametrize("image_format", ["raw", "qcow2"])
def test_zeroes_written_after_the_instant_are_not_in_the_point(coldrise, machine, live, tmp_path, image_format, is_full):
    """QEMU reports zeroes and holes of the present disk where a backup reads the content of its instant."""
    running = machine(image_format=image_format)
    running.write("vda", "write -P 17 0 24M")
    if not is_full:
        live(running)
        running.write("vda", "write -P 18 16M 8M")
    before = MIB * 24 * b"\x11" if is_full else MIB * 16 * b"\x11" + MIB * 8 * b"\x12"
    process = coldrise.start("--json", "backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "2M",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: running.qmp.ask("query-block-exports"), "the export of the instant")
    # The last parts of the disk are read some seconds later. Not multiples of the 64 KiB that QEMU saves at a time.
    for command in ["write -z 20M 1028k", "write -z -u 22M 516k", "discard 23M 260k", "write -P 19 23552k 132k"]:
        running.write("vda", command)
    assert process.poll() is None, "the backup ended before the writes"
    output, message = process.communicate(timeout=120)
    assert process.returncode == 0, message
    made = json.loads(output.splitlines()[-1])
    vda, _ = restored(coldrise, made["address"], tmp_path)
    assert vda.read_bytes()[:24 * MIB] == before
    # The next one has what was written after the instant.
    assert_same_as_now(coldrise, live(running)["address"], running, tmp_path)


@pytest.mark.parametrize("mode", [[], ["--push"]])
def test_only_changed_blocks_are_read(coldrise, machine, live, tmp_path, mode):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    full = live(running, *mode)
    assert full["disks"][0]["read_bytes"] >= 20 * MIB and not full["instant"]["remarks"]
    running.write("vda", "write -P 18 8M 1M")
    running.write("vda", "write -z 4M 64k")
    running.write("vdb", "write -P 19 63M 1M")
    part = live(running, *mode)
    # Zeroes are read, too, where QEMU cannot tell those of the instant.
    assert [disk["read_bytes"] for disk in part["disks"]] == [MIB if mode else MIB + 65536, MIB]
    assert [disk["base"] for disk in part["disks"]] == [full["point"]] * 2
    assert_same_as_now(coldrise, part["address"], running, tmp_path)
    sources = coldrise.json("show", part["address"])
    assert f"qmp:{running.monitor} vda" in json.dumps(sources)
    # Bitmaps of qcow2 images outlive a clean end of QEMU; those of a killed one do not.
    running.close()
    again = machine()
    again.write("vdb", "write -P 20 1M 64k")
    made = live(again, *mode)
    assert [disk["read_bytes"] for disk in made["disks"]] == [0, 65536]
    again.process.kill()
    again.close()
    made = live(machine(), *mode)
    assert not any(disk["is_incremental"] for disk in made["disks"])
    assert "everything is read" in made["instant"]["remarks"][0]


def test_a_raw_disk_and_a_chosen_one(coldrise, machine, live, tmp_path):
    running = machine(image_format="raw", device="scsi-hd", more=("-device", "virtio-scsi-pci"))
    made = live(running, "system=dvdb")
    assert [disk["disk"] for disk in made["disks"]] == ["system"]
    assert made["instant"]["remarks"] == ["disk vda of the machine is not backed up"]
    running.write("vdb", "write -P 1 0 64k")
    assert live(running, "system=vdb")["disks"][0]["read_bytes"] == 65536
    message = failure(coldrise, running, "system=vdc")
    assert "no writable disk 'vdc'" in message and "vda, vdb" in message
    # The same disk under another name has no base.
    assert not live(running, "other=vdb")["disks"][0]["is_incremental"]


def test_a_bitmap_of_another_point_is_ignored(coldrise, machine, live, tmp_path):
    running = machine()
    live(running)
    running.write("vda", "write -P 5 0 1M")
    # Another backup follows in between, with other content.
    (tmp_path / "old.raw").write_bytes(bytes(64 * MIB))
    coldrise.json("backup", "web01", f"vda={tmp_path / 'old.raw'}", f"vdb={tmp_path / 'old.raw'}")
    made = live(running)
    assert not any(disk["is_incremental"] for disk in made["disks"])
    assert all("no dirty bitmap counts from" in remark for remark in made["instant"]["remarks"])
    assert_same_as_now(coldrise, made["address"], running, tmp_path)
    # A bitmap whose name was moved to a disk where it does not belong.
    name = next(iter(running.bitmaps("vdb")))
    running.qmp.ask("block-dirty-bitmap-remove", node="vdb", name=name)
    running.write("vdb", "write -P 6 0 1M")
    made = live(running)
    assert [disk["is_incremental"] for disk in made["disks"]] == [True, False]
    assert_same_as_now(coldrise, made["address"], running, tmp_path)


def test_a_resized_disk(coldrise, machine, live, tmp_path):
    running = machine()
    running.write("vda", "write -P 5 0 1M")
    live(running)
    for mode, size in ([], 96 * MIB), (["--push"], 128 * MIB):
        running.qmp.ask("block_resize", **{"node-name": "vda", "size": size})
        running.write("vda", f"write -P 6 {size - MIB} 1M")
        made = live(running, *mode)
        assert made["disks"][0]["size_bytes"] == size and made["disks"][0]["is_incremental"] == (mode == [])
        assert_same_as_now(coldrise, made["address"], running, tmp_path)


def test_the_point_of_the_bitmap_is_removed(coldrise, machine, live):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    live(running)
    running.write("vda", "write -P 18 0 1M")
    second = live(running)
    # While the instant is taken, the latest backup is forgotten: the one before is not a base for its bitmap.
    agent = Agent(running.folder / "agent")
    agent.at_freeze = lambda: coldrise.json("forget", second["address"])
    message = failure(coldrise, running, "--push", "--quiesce", "--agent", running.folder / "agent")
    assert "no longer the latest backup" in message and running.leftovers() == []
    assert not live(running)["disks"][0]["is_incremental"]
    agent.listener.close()


def test_a_killed_backup_is_cleaned_up_without_loss(coldrise, machine, live, own_tmp, tmp_path):
    running = machine(sector=TICKING_SECTOR)
    last = live(running)
    chance = random.Random(7)
    seen = set()
    for kill in range(8):
        command = ["backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "1M"]
        process = coldrise.start(*command, *(["--push"] if kill % 4 == 3 else []),
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kill % 2:
            # While it reads, at the latest.
            wait_until(lambda: running.leftovers() or process.poll() is not None, "the backup")
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=chance.random() * 0.3)
        process.kill()
        process.wait()
        seen.add(bool(running.leftovers()))
        # Killed after its point was stored, it counts.
        stored = [point["point"] for point in coldrise.json("list", "web01")["machines"][0]["points"]]
        assert last["point"] in stored[-2:] and (process.returncode != 0 or last["point"] != stored[-1])
        made = live(running)
        assert made["disks"][0]["base"] == stored[-1]
        assert all(disk["is_incremental"] for disk in made["disks"]), (kill, made)
        assert_one_instant(*restored(coldrise, made["address"], tmp_path))
        assert running.leftovers() == [] and running.status() == "running"
        last = made
    assert True in seen and not running.failures.read_text()


def test_a_machine_paused_by_a_killed_backup_is_resumed(coldrise, machine, live):
    running = machine(sector=TICKING_SECTOR)
    # The monitor's other side stops between `stop` and `cont`.
    relay = running.folder / "relay"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as qemu:
        listener.bind(str(relay))
        listener.listen()
        process = coldrise.start("backup", "web01", "--from", f"qmp:{relay}", stderr=subprocess.DEVNULL)
        client, _ = listener.accept()
        qemu.connect(str(running.monitor))
        with client:
            kill_at(client, qemu, b'"cont"', process)
    assert running.status() == "paused"
    made = live(running)
    assert running.status() == "running" and running.leftovers() == []
    assert "removed what a killed backup left" in made["instant"]["remarks"][0]


def kill_at(client, qemu, word, process):
    """Passes messages and open files on, until the client sends one with `word`."""
    done = threading.Event()

    def answers():
        with contextlib.suppress(OSError):
            while piece := qemu.recv(1 << 16):
                client.sendall(piece)
        done.set()

    thread = threading.Thread(target=answers)
    thread.start()
    while True:
        piece, files, _, _ = socket.recv_fds(client, 1 << 16, 4)
        if not piece or word in piece:
            break
        socket.send_fds(qemu, [piece], files)
        for file in files:
            os.close(file)
    process.send_signal(signal.SIGKILL)
    process.wait()
    qemu.shutdown(socket.SHUT_RDWR)
    thread.join()
    assert done.is_set()


def test_a_full_scratch_file_breaks_the_backup_and_not_the_guest(coldrise, machine, live, own_tmp, tmp_path):
    running = machine(sector=TICKING_SECTOR)
    live(running)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=14m", "tmpfs", small], check=True)
    try:
        # Too little for a push is known before it starts.
        message = failure(coldrise, running, "a=vda", "--push", "--scratch", small)
        assert "MiB free" in message and "--scratch" in message
        process = coldrise.start("backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "64K",
                                 "--scratch", small, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        wait_until(lambda: "coldrise-e1" in running.leftovers(), "the reading")
        running.write("vda", "write -P 33 32M 24M")
        before = running.counter()
        _, message = process.communicate(timeout=60)
        assert process.returncode == 1 and "--scratch DIR" in message
        wait_until(lambda: running.counter() > before, "the guest's next write")
    finally:
        subprocess.run(["umount", "-l", small], check=True)
    assert running.leftovers() == [] and running.status() == "running"
    assert not running.failures.read_text()
    made = live(running)
    assert all(disk["is_incremental"] for disk in made["disks"])
    assert_one_instant(*restored(coldrise, made["address"], tmp_path))


def test_an_iothread_is_refused_and_push_works(coldrise, machine, live, tmp_path):
    running = machine(sector=TICKING_SECTOR, device="virtio-blk-pci,iothread=io")
    message = failure(coldrise, running)
    version = running.qmp.ask("query-version")["qemu"]
    assert version["major"] < 9 and "iothread" in message and "--push" in message
    assert running.leftovers() == [] and running.bitmaps() == {}
    for is_incremental in (False, True):
        made = live(running, "--push")
        assert made["disks"][0]["is_incremental"] == is_incremental
        assert_one_instant(*restored(coldrise, made["address"], tmp_path))
    assert running.process.poll() is None and not running.failures.read_text()


def test_the_iothread_of_a_scsi_controller_is_refused(coldrise, machine, own_tmp):
    running = machine(device="scsi-hd", more=("-device", "virtio-scsi-pci,iothread=io"))
    assert "iothread" in failure(coldrise, running)


def test_qemu_exits_during_a_backup(coldrise, machine, own_tmp, live):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    process = coldrise.start("backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "1M",
                             stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    wait_until(lambda: "coldrise-e1" in running.leftovers(), "the reading")
    running.process.kill()
    _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and "has ended" in message and "--scratch" not in message
    assert coldrise.json("list")["machines"] == []


def test_a_cancelled_backup_leaves_nothing(coldrise, machine, live):
    running = machine()
    running.write("vda", "write -P 17 0 20M")
    first = live(running)
    running.write("vda", "write -P 18 0 10M")
    process = coldrise.start("backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "1M",
                             stderr=subprocess.DEVNULL)
    wait_until(lambda: "coldrise-e1" in running.leftovers(), "the reading")
    # Another backup of the machine in its second monitor does not disturb this one.
    other = coldrise.run("backup", "other", "--from", f"qmp:{running.folder / 'qmp3'}")
    assert other.returncode == 1 and "-qmp" in other.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    assert running.leftovers() == []
    made = live(running)
    assert made["disks"][0]["base"] == first["point"] and made["disks"][0]["read_bytes"] == 10 * MIB


def test_a_second_backup_of_the_same_machine_waits_for_its_turn(coldrise, machine, live, tmp_path):
    running = machine(more=("-qmp", f"unix:{tmp_path / 'q3'},server=on,wait=off"))
    running.write("vda", "write -P 17 0 20M")
    process = coldrise.start("backup", "web01", "--from", f"qmp:{running.monitor}", "--rate", "1M",
                             stderr=subprocess.DEVNULL)
    wait_until(lambda: "coldrise-e1" in running.leftovers(), "the reading")
    same = coldrise.run("backup", "web02", "--from", f"qmp:{running.monitor}")
    assert same.returncode == 1 and "one client at a time" in same.stderr
    other = coldrise.run("backup", "web02", "--from", f"qmp:{tmp_path / 'q3'}")
    assert other.returncode == 11 and f"process {process.pid}" in other.stderr
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130 and running.leftovers() == []


class Agent(threading.Thread):
    """A guest agent that says which commands came. `silent`: it does not answer that one, for which a clock skips the
    wait."""

    def __init__(self, path, silent=None, clock=None):
        super().__init__(daemon=True)
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(path))
        self.listener.listen()
        self.silent, self.clock = silent, clock
        self.state = "thawed"
        self.commands = []
        self.at_freeze = lambda: None
        self.start()

    def run(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self.listener.accept()
                with client, client.makefile("rb") as lines:
                    client.sendall(b'{"return": "of an earlier client"}\n')
                    for line in lines:
                        self.answer(client, json.loads(line.lstrip(b"\xff")))

    def answer(self, client, question):
        command = question["execute"]
        if command == "guest-sync-delimited":
            client.sendall(b"\xff" + json.dumps({"return": question["arguments"]["id"]}).encode() + b"\n")
            return
        self.commands.append(command.removeprefix("guest-fsfreeze-"))
        if command == self.silent:
            self.clock.skip(11)
            # Wakes the reader; no answer.
            client.sendall(b"\n")
            return
        if command == "guest-fsfreeze-freeze":
            self.at_freeze()
        result = {"guest-fsfreeze-status": self.state}.get(command, 1)
        if command != "guest-fsfreeze-status":
            self.state = "frozen" if command.endswith("freeze") else "thawed"
        client.sendall(json.dumps({"return": result}).encode() + b"\n")


def test_the_guest_is_frozen_for_the_instant_and_thawed(coldrise, machine, live, tmp_path):
    running = machine(sector=TICKING_SECTOR)
    agent = Agent(running.folder / "agent", clock=BothClocks(tmp_path))
    agent.state = "frozen"
    options = ("--quiesce", "--agent", running.folder / "agent")
    made = live(running, *options)
    assert made["instant"]["is_quiesced"] and "thawed the guest" in made["instant"]["remarks"][0]
    assert agent.commands == ["status", "thaw", "freeze", "thaw"] and agent.state == "thawed"
    # A guest that does not freeze in time is still backed up, and thawed.
    agent.commands.clear()
    agent.silent = "guest-fsfreeze-freeze"
    with agent.clock.of(coldrise):
        made = live(running, *options)
    assert not made["instant"]["is_quiesced"] and "not frozen" in made["instant"]["remarks"][0]
    assert agent.commands == ["status", "freeze", "thaw"]
    agent.listener.close()


@pytest.mark.parametrize("answer", ["{}", "[" * 50000, json.dumps({"return": {"qemu": 3}}),
                                    json.dumps({"return": "x" * 500000}), json.dumps({"event": "STOP"})],
                         ids=["empty", "deep", "odd", "long", "gone"])
def test_hostile_answers_of_qemu_end_the_backup(coldrise, own_tmp, answer):
    path = own_tmp / "hostile"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        process = coldrise.start("backup", "web01", "--from", f"qmp:{path}", stderr=subprocess.PIPE)
        client, _ = listener.accept()
        with client, client.makefile("rb") as questions:
            client.sendall(b'{"QMP": {}}\n')
            number = json.loads(questions.readline())["id"]
            client.sendall(json.dumps({"return": {}, "id": number}).encode() + b"\n")
            with contextlib.suppress(OSError):
                while question := questions.readline():
                    reply = answer.replace('{"return"', f'{{"id": {json.loads(question)["id"]}, "return"', 1)
                    client.sendall(reply.encode() + b"\n")
                    if "event" in answer:
                        client.close()
                        break
        _, message = process.communicate(timeout=60)
    assert process.returncode == 1 and len(message) < 2000, message


def test_a_job_of_the_service(service, machine, coldrise):
    running = machine()
    running.write("vda", "write -P 17 0 2M")
    socket_of_all = str(running.monitor).replace("qmp", "{machine}")
    running.monitor.rename(running.folder / "web01")
    service.post("jobs", {"name": "running", "kind": "backup", "machines": ["web01"], "from": f"qmp:{socket_of_all}",
                          "disks": {"system": "vda"}})
    for number in (1, 2):
        service.post("jobs/running/start", {}, expected=(202,))
        wait_until(lambda: not service.get("queue")["runs"], "the end of the run")
        points = coldrise.json("list", "web01")["machines"][0]["points"]
        assert len(points) == number and [disk["disk"] for disk in points[0]["disks"]] == ["system"]
    assert running.leftovers() == [] and len(running.bitmaps()) == 1


def test_incompatible_options_are_refused(coldrise, tmp_path):
    for options in (["--from", "web01"], ["--from", "qmp:"], ["--push"], ["--from", "qmp:x", "--bitmap", "y"],
                    ["--from", "qmp:x", "--quiesce"]):
        done = coldrise.run("backup", "web01", *options)
        assert done.returncode == 2, done.stderr
    done = coldrise.run("backup", "web01", "--from", f"qmp:{tmp_path}/none")
    assert done.returncode == 1 and "is the machine running" in done.stderr

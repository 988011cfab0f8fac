"""Several `coldrise backup` commands on one repository at the same time: they share what they
store, none waits for another, and none is disturbed when another one fails or is killed."""

import contextlib
import json
import signal
import socket
import stat
import subprocess

import pytest

from support.image import Image
from support.nbdserver import wait_until
from support.sources import RunningBackup, gated_server

MIB = 1 << 20
CHUNKS_PER_MIB = 64
SHARED_MIB = 4
SIZE_MIB = 12


def make_disk(seed):
    """A disk whose first part all have in common."""
    disk = Image(SIZE_MIB * MIB)
    disk.fill(0, SHARED_MIB * MIB, "shared")
    disk.fill(SHARED_MIB * MIB, (SIZE_MIB - SHARED_MIB) * MIB, seed)
    return disk


class Slow:
    """A backup whose source stops after the first half until the test releases it."""

    def __init__(self, coldrise, stack, folder, machine, disk=None):
        self.machine, self.disk = machine, disk or make_disk(machine)
        path = self.disk.save(folder / f"{machine}.source")
        uri, self.server, self.gate = stack.enter_context(gated_server(path, SIZE_MIB // 2 * MIB))
        self.running = RunningBackup(coldrise, machine, f"vda={uri}")
        self.process = self.running.process

    def go_on(self):
        self.gate.touch()

    def end(self, number=None, code=0):
        """The last object of the command."""
        if number is not None:
            # Before the source continues: the rest is soon read, and the command would have ended by itself.
            self.process.send_signal(number)
        self.go_on()
        ended, made, messages = self.running.end()
        assert ended == code, messages
        return made

    def has_begun_again(self):
        """Whether it has read anything twice."""
        read = [line["read_bytes"] for line in self.running.lines if line.get("event") == "progress"]
        return read != sorted(read)


@pytest.fixture
def start(coldrise, tmp_path):
    """Starts such a backup; the first one that runs holds the writer."""
    with contextlib.ExitStack() as stack:
        started = []

        def begin(machine, *arguments, **keywords):
            started.append(Slow(coldrise, stack, tmp_path, machine, *arguments, **keywords))
            return started[-1]

        yield begin
        for slow in started:
            slow.go_on()
            if slow.process.poll() is None:
                slow.process.kill()
                slow.process.communicate()


@pytest.fixture
def assert_sound(coldrise, tmp_path):
    """After a gc every point reads as its disk, and nothing is damaged."""
    def check(contents):
        coldrise.json("gc")
        for address, disk in contents.items():
            target = tmp_path / "restored.raw"
            coldrise.json("restore", f"{address}/vda", target, "--force")
            assert target.read_bytes() == bytes(disk.content), address
        assert coldrise.json("verify")["is_clean"]
    return check


def save(coldrise, tmp_path, machine, disk):
    return coldrise.json("backup", machine, f"vda=raw:{disk.save(tmp_path / 'quick.raw')}")


def test_concurrent_backups_share_stored_chunks(coldrise, start, tmp_path, assert_sound):
    first, second = start("web01"), start("web02")
    # While both are stopped, a third one starts and ends.
    disk = make_disk("web03")
    third = save(coldrise, tmp_path, "web03", disk)
    assert first.process.poll() is None and second.process.poll() is None
    made = [first.end(), second.end(), third]
    new = sum(entry["disks"][0]["new_chunks"] for entry in made)
    assert new == (SHARED_MIB + 3 * (SIZE_MIB - SHARED_MIB)) * CHUNKS_PER_MIB
    disks = [first.disk, second.disk, disk]
    assert_sound({entry["address"]: disk for entry, disk in zip(made, disks)})
    assert not list(coldrise.repository.glob("writer.c*")), "nobody listens any more"


def test_the_first_does_not_wait_and_the_others_read_nothing_twice(
        coldrise, start, assert_sound):
    first, second, third = start("web01"), start("web02"), start("web03")
    made = {first.end()["address"]: first.disk}
    assert second.process.poll() is None and third.process.poll() is None
    for slow in (second, third):
        made[slow.end()["address"]] = slow.disk
        assert not slow.has_begun_again()
    assert_sound(made)


def test_guest_data_survives_a_gc_from_another_host(
        coldrise, start, tmp_path, assert_sound):
    base = make_disk("base")
    saved = save(coldrise, tmp_path, "web02", base)["address"]
    disk = make_disk("base")
    disk.fill(8 * MIB, 4 * MIB, "new")
    first, second = start("web01"), start("web02", disk=disk)
    made = {first.end()["address"]: first.disk}
    # No process writes now: the second backup is stopped, and its base is removed.
    coldrise.json("forget", saved)
    assert coldrise.json("gc")["chunks_deleted"] == 0
    made[second.end()["address"]] = disk
    assert not second.has_begun_again()
    assert_sound(made)


@pytest.mark.parametrize("which,how", [
    ("host", signal.SIGKILL), ("guest", signal.SIGKILL), ("host", signal.SIGINT), ("guest", "source")])
def test_an_early_exit_does_not_disturb_others(coldrise, start, tmp_path, assert_sound, how, which):
    backups = [start("web01"), start("web02"), start("web03")]
    ended = backups.pop(0 if which == "host" else 1)
    if how == "source":
        ended.server.kill()
        ended.end(code=1)
    else:
        ended.end(how, code=130 if how == signal.SIGINT else -how)
    # The others have ended neither with it nor before it.
    assert all(backup.process.poll() is None for backup in backups)
    made = {backup.end()["address"]: backup.disk for backup in backups}
    is_killed_host = (which, how) == ("host", signal.SIGKILL)
    assert all(backup.has_begun_again() == is_killed_host for backup in backups)
    # Its machine is unlocked, and its stored chunks are reused.
    again = save(coldrise, tmp_path, ended.machine, ended.disk)
    assert again["disks"][0]["known_chunks"] >= SHARED_MIB * CHUNKS_PER_MIB
    made[again["address"]] = ended.disk
    assert_sound(made)


def test_a_machine_is_backed_up_by_one_command_at_a_time(coldrise, start, tmp_path):
    first = start("web01")
    for machine in ("web01", "web01"):
        refused = coldrise.run("backup", machine, f"vda=raw:{tmp_path / 'web01.source'}")
        assert refused.returncode == 11
        assert "another backup or copy of web01 is running" in refused.stderr
    assert first.end()["machine"] == "web01"
    assert not list((coldrise.repository / "leases").iterdir())


def test_a_gc_during_two_backups_keeps_the_chunks_they_reuse(coldrise, start, tmp_path, assert_sound):
    forgotten = [save(coldrise, tmp_path, machine, make_disk(content))["address"]
                 for machine, content in (("old01", "web01"), ("old02", "web02"), ("old03", "gone"))]
    coldrise.json("forget", *forgotten)
    backups = [start("web01"), start("web02")]
    done = coldrise.json("gc")
    assert done["chunks_deleted"] >= (SIZE_MIB - SHARED_MIB) * CHUNKS_PER_MIB
    assert all(backup.process.poll() is None for backup in backups), "the gc ran beside them"
    assert_sound({backup.end()["address"]: backup.disk for backup in backups})


def test_only_key_holders_are_admitted(coldrise, start, tmp_path):
    first = start("web01")
    path = coldrise.repository / "writer.control"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    stranger = tmp_path / "stranger"
    stranger.write_text("another passphrase\n", encoding="utf-8")
    refused = coldrise.run("--passphrase-file", stranger, "backup", "web02",
                           f"vda=raw:{tmp_path / 'web01.source'}")
    assert refused.returncode == 12, refused.stderr

    def say(*lines):
        """The host's answer to a program without the key."""
        with socket.socket(socket.AF_UNIX) as stream:
            stream.connect(str(path))
            stream.settimeout(30)
            answers = stream.makefile()
            heard = []
            for line in lines:
                stream.sendall(json.dumps(line).encode() + b"\n")
                heard.append(json.loads(answers.readline()))
            assert not answers.readline(), "the host has ended the connection"
            return heard

    hello = {"backup": {"nonce": [7] * 16}}
    disk = {"start": {"base": None, "size_bytes": 4096, "threads": 1}}
    for instead_of_a_proof in ({"proof": [0] * 32}, disk, "finish"):
        welcome, refused = say(hello, instead_of_a_proof)
        assert "welcome" in welcome
        assert refused["failed"]["kind"] == "wrong_passphrase"
    assert "failed" in say({"nonsense": 1})[0]
    first.end()


def test_another_command_that_holds_the_writer_lock_still_blocks(coldrise, start, tmp_path):
    """Only backups share the writer; other commands do not."""
    first = start("web01")
    for arguments in (["fold"], ["repair"]):
        refused = coldrise.run(*arguments)
        assert refused.returncode == 11, refused.stderr
    first.end()


def test_many_concurrent_commands(coldrise, tmp_path, assert_sound):
    """Hosts start and end while others start."""
    disks = {f"web{number:02}": make_disk(f"{number}") for number in range(6)}
    paths = {machine: disk.save(tmp_path / f"{machine}.raw") for machine, disk in disks.items()}
    running = {}
    for machine, path in paths.items():
        running[machine] = coldrise.start("--json", "backup", machine, f"vda=raw:{path}",
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    made = {}
    for machine, process in running.items():
        output, messages = process.communicate(timeout=120)
        assert process.returncode == 0, messages
        assert not messages
        made[json.loads(output.splitlines()[-1])["address"]] = disks[machine]
    assert_sound(made)


def test_hosts_that_are_killed_one_after_the_other(coldrise, start, assert_sound):
    backups = [start(f"web{number:02}") for number in range(4)]
    for victim in backups[:2]:
        victim.process.kill()
        victim.process.communicate()
        # The next one holds the writer once its source has given something again.
        for backup in backups[2:]:
            backup.go_on()
        wait_until(lambda: (coldrise.repository / "writer.control").exists(), "the next host")
    assert_sound({backup.end()["address"]: backup.disk for backup in backups[2:]})


def test_points_are_forgotten_and_pruned_during_backups(coldrise, start, tmp_path, assert_sound):
    """Also the point that a running backup builds upon: its data stays."""
    base = make_disk("base")
    old = [save(coldrise, tmp_path, "web01", base)["address"] for _ in range(3)]
    changed = make_disk("web01")
    first, second = start("web01", changed), start("web02")
    kept = save(coldrise, tmp_path, "web03", make_disk("web03"))["address"]
    gone = save(coldrise, tmp_path, "web03", make_disk("gone"))["address"]
    assert coldrise.json("prune", "--keep-last", "1", "web01")["forgotten"] == 2
    assert coldrise.json("forget", gone, old[2])["points"] == [old[2], gone]
    shown = coldrise.json("list")["machines"]
    assert [machine["machine"] for machine in shown] == ["web03"]
    refused = coldrise.run("forget", old[0])
    assert refused.returncode == 1 and "web01" in refused.stderr, refused.stderr
    coldrise.json("gc")
    made = {kept: make_disk("web03")}
    for slow in (first, second):
        made[slow.end()["address"]] = slow.disk
    assert_sound(made)


def test_points_are_protected_and_quarantined_during_a_backup(coldrise, start, tmp_path):
    address = save(coldrise, tmp_path, "db01", make_disk("db01"))["address"]
    first, second = start("web01"), start("web02")

    def point():
        return coldrise.json("show", address)

    assert coldrise.json("protect", address)["points"] == [address] and point()["is_protected"]
    assert coldrise.json("prune", "--keep-last", "1", "db01")["forgotten"] == 0
    coldrise.json("quarantine", address)
    assert point()["quarantine"] == "chosen" and point()["is_protected"]
    assert coldrise.run("publish", address).returncode == 1
    coldrise.json("release", address)
    coldrise.json("unprotect", address)
    assert point().get("quarantine") is None and not point()["is_protected"]
    refused = coldrise.run("protect", "db01/20200101T000000Z")
    assert refused.returncode == 1 and "db01" in refused.stderr, refused.stderr
    for slow in (first, second):
        assert slow.process.poll() is None
        slow.end()


def test_a_published_point_is_not_forgotten_during_a_backup(coldrise, start, tmp_path):
    point = save(coldrise, tmp_path, "db01", make_disk("db01"))["address"]
    other = save(coldrise, tmp_path, "db01", make_disk("db02"))["address"]
    running = start("web01")
    coldrise.publish(point, "trial")
    refused = coldrise.run("forget", point, other)
    assert refused.returncode == 11 and "unpublish trial" in refused.stderr, refused.stderr
    assert coldrise.json("show", other)["point"] == other.partition("/")[2], "all points or none"
    running.end()

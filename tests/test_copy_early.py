"""A machine boots at the other site before the copy of its point has ended."""

import errno
import contextlib
import json
import os
import random
import signal
import socket
import subprocess

import nbd
import pytest

from support.cli import PROGRAM, ROOT
from support.copies import addresses, content
from support.counting_machine import XML
from support.guest import Guest
from support.libvirt import QEMU_USER, Libvirt
from support.line import Line
from support.nbdserver import DEADLINE_S, Nbdkit, read_all, wait_until
from support.far_site import FarSite

MIB = 1 << 20
POINT = "20261101T100000Z"
ADDRESS = f"web01/{POINT}"


@pytest.fixture
def copying(coldrise):
    """Starts copies; all are ended."""
    def start(*options):
        return coldrise.start("--json", "copy", "--to", "far", *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    yield start
    coldrise.end()


@pytest.fixture
def served(tmp_path):
    """Serves the sessions of a site over NBD."""
    servers = []

    def start(program):
        servers.append(Nbdkit(program, tmp_path / f"served{len(servers)}"))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def back_up(coldrise, tmp_path, point=POINT, size=24 * MIB, seed=3):
    """A point of a disk with content, zeroes and a hole."""
    disk = bytearray(random.Random(seed).randbytes(size))
    disk[MIB : 2 * MIB] = bytes(MIB)
    disk[5 * MIB : 5 * MIB + 65536] = bytes(65536)
    path = tmp_path / "vda.raw"
    path.write_bytes(disk)
    coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", point)
    return disk


def coming(program, address=ADDRESS):
    """What `show` says while it is coming; None before."""
    done = program.run("--json", "show", address)
    if done.returncode != 0:
        return None
    shown = json.loads(done.stdout)
    return shown if shown.get("kind") == "coming" else None


def is_connected(program, address=ADDRESS):
    return (coming(program, address) or {"is_reachable": False})["is_reachable"]


def finish(process):
    printed, message = process.communicate(timeout=120)
    assert process.returncode == 0, message
    return json.loads(printed.splitlines()[-1])


def fails(handle, offset, length=65536):
    with pytest.raises(nbd.Error) as failed:
        handle.pread(length, offset)
    return failed.value.errno == "EIO" or failed.value.errnum == errno.EIO


@pytest.mark.parametrize("percent", [0, 30])
def test_a_session_over_a_coming_point_reads_as_its_source(coldrise, far, copying, served, tmp_path, percent):
    disk = back_up(coldrise, tmp_path)
    # It comes for 26 seconds, and is noted after 10: about nine programs start while it does.
    process = copying("--rate", "900K")
    shown = wait_until(lambda: coming(far.program), "the announcement")
    assert shown["size_bytes"] == len(disk) and shown["is_reachable"]
    wait_until(lambda: coming(far.program)["percent_here"] >= percent, "a part of it")
    # It is no restore point: nothing but publish and boot sees it.
    assert addresses(far.program) == set()
    listed = far.program.json("list")["coming"]
    assert [point["address"] for point in listed] == [ADDRESS]
    assert "coming" in far.program.run("list").stdout
    assert far.program.run("restore", f"{ADDRESS}/vda", tmp_path / "no").returncode != 0
    published = far.program.run("publish", "web01/latest", "--name", "early")
    assert published.returncode == 0 and "is still on its way" in published.stderr, published.stderr
    assert "rerror=stop" in published.stdout
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        handle.pwrite(b"\x5a" * 5000, 7 * MIB + 300)
        handle.flush()
        disk[7 * MIB + 300 : 7 * MIB + 5300] = b"\x5a" * 5000
        # What it captured is not sealed before the point is complete.
        for command in (["seal", "early"], ["unpublish", "early"]):
            refused = far.program.run(*command)
            assert refused.returncode == 11, refused.stderr
        assert read_all(handle) == disk
        far.program.json("gc", "--max-unused", "0")
        # A second read is local, and the same.
        assert read_all(handle) == disk
        finish(process)
        assert addresses(far.program) == {ADDRESS} and coming(far.program) is None
        sealed = far.program.json("seal", "early")["address"]
        assert read_all(handle) == disk
    server.stop()
    assert content(far.program, f"{sealed}/vda", tmp_path) == disk
    far.program.json("gc", "--max-unused", "0")
    assert content(far.program, f"{sealed}/vda", tmp_path) == disk
    assert far.program.json("verify")["is_clean"]
    far.program.json("unpublish", "early")
    assert list((far.program.repository / "begun").iterdir()) == []


def test_what_needs_a_restore_point_says_that_it_is_on_its_way(coldrise, far, copying, tmp_path):
    earlier, unknown = "20261031T100000Z", "20261130T100000Z"
    disk = tmp_path / "other.raw"
    disk.write_bytes(random.Random(8).randbytes(MIB))
    far.program.json("backup", "web02", f"vda=raw:{disk}", "--time", earlier)
    back_up(coldrise, tmp_path)
    copying("--rate", "200K")
    wait_until(lambda: coming(far.program), "the announcement")
    commands = [["forget"], ["forget", "--dry-run"], ["protect"], ["unprotect"], ["quarantine"], ["release"], ["verify"],
                ["diff", f"web02/{earlier}"], ["check-boot"]]
    for command in commands:
        refused = far.program.run(*command, ADDRESS)
        assert refused.returncode == 1, (command, refused)
        assert f"{ADDRESS} is still on its way here" in refused.stderr, (command, refused.stderr)
        assert "wait for the end of the copy" in refused.stderr and "coldrise list" in refused.stderr
        # It is the kind of error that any other point gives.
        assert far.program.run(*command, f"web01/{unknown}").returncode == 1
    for address in (f"{ADDRESS}/vda", "web01/latest/vda"):
        refused = far.program.run("restore", address, tmp_path / "no")
        assert refused.returncode == 1 and "is still on its way here" in refused.stderr, refused.stderr
    answer = json.loads(far.program.run("--json", "protect", ADDRESS).stdout)
    assert answer["error"]["kind"] == "not_found"
    # Other points, and machines of which nothing comes, are not here and not on their way.
    for address in (f"web01/{unknown}", "web01/latest~1", f"web03/{unknown}"):
        refused = far.program.run("protect", address)
        assert refused.returncode == 1 and "on its way" not in refused.stderr, refused.stderr
    assert coming(far.program)["percent_here"] < 100


@pytest.mark.parametrize("how", ["named", "all"])
def test_a_point_that_comes_no_more_is_given_up(coldrise, far, copying, tmp_path, how):
    back_up(coldrise, tmp_path)
    process = copying("--rate", "1M", "--retry", "0s")
    far.wait_for_note()
    process.kill()
    process.communicate()
    coldrise.json("forget", ADDRESS)
    wait_until(lambda: not is_connected(far.program), "the end of the line")
    finish(copying())
    assert coming(far.program)["percent_here"] > 0
    far.program.json("publish", ADDRESS, "--name", "early")
    refused = far.program.run("forget", ADDRESS)
    assert refused.returncode == 11 and "unpublish early --discard" in refused.stderr, refused
    far.program.json("unpublish", "early", "--discard")
    refused = far.program.run("restore", ADDRESS, tmp_path / "none")
    assert f"coldrise forget {ADDRESS}" in refused.stderr, refused
    # All or none: while a backup has the machine, the other point stays, too.
    kept = far.program.backup("web01", vda=tmp_path / "vda.raw")
    backing_up = far.program.start("backup", "web01", f"vda=raw:{tmp_path / 'vda.raw'}", "--rate", "64K", stderr=subprocess.PIPE)
    assert " of 24.0 MiB" in backing_up.stderr.readline(), "its progress"
    refused = far.program.run("forget", kept, ADDRESS)
    assert refused.returncode == 11 and "is running" in refused.stderr, refused
    assert ADDRESS in far.program.json("forget", "--dry-run", kept, ADDRESS)["points"]
    backing_up.kill()
    backing_up.communicate()
    assert kept in addresses(far.program) and coming(far.program)
    assert far.program.json("forget", "--dry-run", ADDRESS)["points"] == [ADDRESS] and coming(far.program)
    named = [kept, ADDRESS, ADDRESS] if how == "named" else ["--all", "web01"]
    assert sorted(far.program.json("forget", *named)["points"]) == sorted([kept, ADDRESS])
    assert "coming" not in far.program.json("list") and coming(far.program) is None
    # It is no point that was there, and what had arrived is returned.
    assert far.program.run("forget", ADDRESS).returncode == 1
    far.program.json("gc", "--max-unused", "0")
    assert far.program.json("verify")["is_clean"]
    # A later copy brings it from the beginning.
    disk = back_up(coldrise, tmp_path)
    finish(copying())
    assert content(far.program, f"{ADDRESS}/vda", tmp_path) == disk


def test_what_was_fetched_is_not_sent_again(coldrise, far, copying, served, tmp_path):
    # More than the names that are under way at once.
    disk = back_up(coldrise, tmp_path, size=112 * MIB)
    process = copying("--rate", "8M")
    wait_until(lambda: is_connected(far.program), "the announcement")
    far.program.json("publish", ADDRESS, "--name", "early")
    with served(far.program).connect("live/early/vda") as handle:
        for at in range(104 * MIB, 112 * MIB, MIB):
            assert handle.pread(MIB, at) == disk[at : at + MIB]
    copied = finish(process)
    # Zeroes are not sent at all.
    assert 108 * MIB < copied["line"]["sent_bytes"] < 116 * MIB
    assert content(far.program, f"{ADDRESS}/vda", tmp_path) == disk


@pytest.mark.parametrize("prefix", ["", "north-"])
def test_parts_that_are_here_are_read_without_the_source(coldrise, copying, served, tmp_path, prefix):
    first = back_up(coldrise, tmp_path, point="20261101T090000Z")
    far = FarSite(tmp_path)
    far.start()
    try:
        far.pair(coldrise, "far", *(["--prefix", prefix] if prefix else []))
        finish(copying())
        # 8 of 24 MiB are others, and a part that was zeroes has content.
        second = first.copy()
        second[12 * MIB : 20 * MIB] = random.Random(5).randbytes(8 * MIB)
        second[MIB : MIB + 65536] = random.Random(6).randbytes(65536)
        path = tmp_path / "vda.raw"
        path.write_bytes(second)
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", POINT)
        process = copying("--rate", "200K", "--retry", "0s")
        address = f"{prefix}{ADDRESS}"
        wait_until(lambda: is_connected(far.program, address), "the announcement")
        # The newest restore point is the latest one.
        latest = far.program.json("show", f"{prefix}web01/latest")
        assert latest["address"] == f"{prefix}web01/20261101T090000Z"
        far.program.json("publish", address, "--name", "early")
        server = served(far.program)
        with server.connect("live/early/vda") as handle:
            assert handle.pread(256 << 10, 16 * MIB) == second[16 * MIB : 16 * MIB + (256 << 10)]
            handle.pwrite(b"mine", 19 * MIB)
            handle.flush()
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=DEADLINE_S)
            wait_until(lambda: not is_connected(far.program, address), "the end of the line")
            told = far.program.run("sessions").stdout
            assert "early" in told and "the other site is not connected" in told, told
            # What the base has, what was fetched, what was written.
            assert handle.pread(12 * MIB - 2 * MIB, 2 * MIB) == second[2 * MIB : 12 * MIB]
            assert handle.pread(256 << 10, 16 * MIB) == second[16 * MIB : 16 * MIB + (256 << 10)]
            assert handle.pread(4096, 19 * MIB)[:4] == b"mine"
            assert fails(handle, 18 * MIB)
            far.program.json("gc", "--max-unused", "0")
            assert handle.pread(256 << 10, 16 * MIB) == second[16 * MIB : 16 * MIB + (256 << 10)]
        server.stop()
        refused = far.program.run("publish", address, "--name", "again")
        assert refused.returncode == 0 and "the other site is not connected" in refused.stderr
        far.program.json("unpublish", "again", "--discard")
        # The copy goes on, and the session with it.
        finish(copying())
        assert far.program.json("seal", "early")["address"].startswith(address)
        second[19 * MIB : 19 * MIB + 4] = b"mine"
        assert content(far.program, f"{address}+1/vda", tmp_path) == second
        assert far.program.json("verify")["is_clean"]
    finally:
        far.close()


def test_the_receiver_is_killed_and_comes_back(coldrise, far, copying, served, tmp_path):
    disk = back_up(coldrise, tmp_path, size=16 * MIB)
    # It still comes when the receiver is back.
    process = copying("--rate", "600K")
    wait_until(lambda: is_connected(far.program), "the announcement")
    far.program.json("publish", ADDRESS, "--name", "early")
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        assert handle.pread(MIB, 8 * MIB) == disk[8 * MIB : 9 * MIB]
        far.stop(signal.SIGKILL)
        far.start()
        # A read waits for the line, for some time; the source connects again by itself.
        wait_until(lambda: is_connected(far.program), "the line")
        assert handle.pread(MIB, 12 * MIB) == disk[12 * MIB : 13 * MIB]
        # The front end is killed, too.
        handle.pwrite(b"mine", 4 * MIB)
        handle.flush()
    server.kill()
    disk[4 * MIB : 4 * MIB + 4] = b"mine"
    with served(far.program).connect("live/early/vda") as handle:
        assert read_all(handle) == disk
    finish(process)
    far.program.json("unpublish", "early")
    assert content(far.program, f"{ADDRESS}+1/vda", tmp_path) == disk


def test_a_session_stays_when_another_point_begins(coldrise, far, copying, served, tmp_path):
    disk = back_up(coldrise, tmp_path)
    process = copying("--rate", "1M", "--retry", "0s")
    wait_until(lambda: is_connected(far.program), "the announcement")
    far.program.json("publish", ADDRESS, "--name", "early")
    server = served(far.program)
    with server.connect("live/early/vda") as handle:
        assert handle.pread(MIB, 8 * MIB) == disk[8 * MIB : 9 * MIB]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=DEADLINE_S)
        coldrise.json("forget", ADDRESS)
        other = back_up(coldrise, tmp_path, point="20261102T100000Z", seed=4)
        wait_until(lambda: not is_connected(far.program), "the end of the line")
        finish(copying())
        assert content(far.program, "web01/latest/vda", tmp_path) == other
        far.program.json("gc", "--max-unused", "0")
        assert handle.pread(MIB, 8 * MIB) == disk[8 * MIB : 9 * MIB]
        assert fails(handle, 22 * MIB)
    server.stop()
    assert far.program.run("unpublish", "early").returncode == 0
    assert far.program.json("verify")["is_clean"]


def test_a_guest_boots_from_nothing_over_a_slow_line(coldrise, copying, tmp_path):
    image = tmp_path / "guest.raw"
    build = subprocess.run([ROOT / "images/guest/build.sh", image], capture_output=True, text=True, timeout=900)
    assert build.returncode == 0, build.stderr
    coldrise.json("backup", "web01", f"vda=raw:{image}", "--time", POINT)
    with contextlib.closing(Line(tmp_path)) as line:
        coldrise.wrap = line.near.command
        with contextlib.closing(FarSite(tmp_path, line=line)) as far:
            far.start()
            far.pair(coldrise)
            copying("--retry", "0s")
            wait_until(lambda: is_connected(far.program), "the announcement")
            boot = [PROGRAM, "boot", "web01/latest", "--name", "early", "--memory", "1G", "--cpus", "1"]
            with Guest([], log=tmp_path / "console.log", boot=boot, environment=far.program.environment()) as guest:
                guest.wait_for_login(timeout=600)
                guest.login()
                assert guest.run("echo kept > /root/mine && sync && cat /root/mine") == (0, "kept\n")


# 16-bit code: for ever, read a sector every 128 KiB of the first 8 MiB.
#   xor ax,ax; mov ds,ax; mov es,ax; mov [0x500],dl
#   next: mov si,0x7c60; mov ah,0x42; mov dl,[0x500]; int 0x13; add dword [0x7c68],256; and dword [0x7c68],0x3fff; jmp next
READER = bytes.fromhex("31c08ed88ec088160005" "be607c" "b442" "8a160005" "cd13" "668106687c00010000" "668126687cff3f0000"
                       "ebe1").ljust(0x60, b"\0") + bytes.fromhex("1000010000100000")  # fmt: skip


def test_a_machine_is_recovered_from_a_coming_point_and_waits_for_what_is_missing(coldrise, far, copying, own_tmp, tmp_path):
    disk, xml = tmp_path / "vda.raw", tmp_path / "web01.xml"
    disk.write_bytes(READER.ljust(510, b"\0") + b"\x55\xaa" + random.Random(7).randbytes(8 * MIB - 512))
    xml.write_text(XML, encoding="utf-8")
    coldrise.json("backup", "web01", f"vda=raw:{disk}", "--config", xml, "--time", POINT)
    process = copying("--rate", "200K", "--retry", "0s")
    wait_until(lambda: is_connected(far.program), "the announcement")
    own_tmp.chmod(0o755)
    with contextlib.closing(Libvirt()) as libvirt, open(tmp_path / "said", "w+", encoding="utf-8") as said:
        def reads():
            return int(dict(line.split()[1:] for line in libvirt.virsh("domblkstat", "web01", "vda").splitlines())["rd_req"])

        recovery = far.program.start("--json", "recover", "web01/latest", "--to", "libvirt", "--connect", libvirt.uri, "--socket",
                                     own_tmp / "nbd", "--socket-owner", QEMU_USER, stdout=subprocess.PIPE, stderr=said)
        try:
            event = recovery.stdout.readline()
            said.seek(0)
            assert event and "is still on its way" in said.read()
            session = json.loads(event)["session"]
            begun = reads()
            wait_until(lambda: reads() > begun, "what is missing is fetched")
            refused = far.program.run("recover", f"live/{session}", "--undo")
            assert refused.returncode == 11 and "--discard" in refused.stderr, refused.stderr
            assert libvirt.domains() == ["web01"]
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=DEADLINE_S)
            wait_until(lambda: "I/O error" in libvirt.state("web01"), "the machine waits")
            finish(copying())
            # It goes on by itself, and reads all that it could not.
            before = reads()
            wait_until(lambda: reads() > before + 64 and libvirt.state("web01").startswith("running"), "the machine goes on")
            assert far.program.json("recover", f"live/{session}", "--undo")["machine_ended"]
            recovery.wait(timeout=DEADLINE_S)
        finally:
            far.program.end()
    assert far.program.json("verify")["is_clean"]


def test_only_who_knows_the_key_is_answered(coldrise, far, copying, tmp_path):
    back_up(coldrise, tmp_path)
    copying("--rate", "1M")
    wait_until(lambda: is_connected(far.program), "the announcement")
    (path,) = (far.program.repository / "begun").glob("*.socket")
    assert path.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(DEADLINE_S)
        # Addresses of sockets have at most 107 bytes.
        folder = os.open(path.parent, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{folder}/{path.name}")
        os.close(folder)
        client.sendall(json.dumps({"nonce": [0] * 16}).encode() + b"\n")
        assert json.loads(client.makefile().readline())["proof"]
        client.sendall(bytes(32))
        assert client.recv(1) == b""
    for stored in (far.program.repository / "begun").glob("*"):
        if not stored.is_socket():
            assert b"web01" not in stored.read_bytes()

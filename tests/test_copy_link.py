"""coldrise copy over a link: two sites, paired by a code, on loopback."""

import contextlib
import json
import os
import random
import signal
import subprocess
from collections import Counter

import pytest

from support.copies import addresses, check, content, make_history
from support.far_site import FarSite, finish, wait_for_beginning
from support.image import Image
from support.nbdserver import DEADLINE_S, wait_until
from support.wallclock import BothClocks

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def gated(site, coldrise):
    """Makes a site that is dialled through a gate; the options are those of the link."""
    def make(*options, environment=None):
        made = site()
        made.environment = environment or {}
        made.put_gate()
        made.pair(coldrise, "far", *options)
        return made

    yield make
    # A copy that is held would take its time to end.
    for process in coldrise.started:
        process.kill()


@pytest.fixture
def history(coldrise, nbdkit, tmp_path):
    return make_history(coldrise, nbdkit, tmp_path)


def test_copied_points_are_identical_and_only_changes_are_sent(coldrise, far, history, tmp_path):
    copied = coldrise.json("copy", "--to", "far")
    (machine,) = copied["machines"]
    first, second, third, sealed = machine["points"]
    assert first["base"] is None and [p["base"] for p in (second, third, sealed)] == [
        first["point"], second["point"], first["point"]]
    # Seven MiB of text compress, and a piece is sent once.
    line = copied["line"]
    assert line["content_bytes"] <= 8 * MIB and line["sent_bytes"] < line["content_bytes"] + MIB
    # Each byte of the disks is in one of the counters, and the only machine has them all.
    parts = ("unchanged_bytes", "zero_bytes", "known_bytes", "content_bytes")
    assert line["offered_bytes"] == copied["size_bytes"] == sum(line[part] for part in parts)
    assert line["unchanged_bytes"] > 30 * MIB and line["zero_bytes"] > 9 * MIB
    assert line["content_bytes"] > line["delta_bytes"] + line["compression_bytes"]
    assert all(machine["line"][part] == line[part] for part in parts)
    check(far.program, history, tmp_path)
    assert far.program.json("verify")["is_clean"]
    again = coldrise.json("copy", "--to", "far")
    assert (again["points"], again["line"]["content_bytes"]) == (0, 0)
    # Content stored there under another name is not sent again.
    coldrise.json("copy", "web01", "--as", "other", "--to", "far", "--last", "1")
    line = coldrise.json("copy", "web01", "--as", "third", "--to", "far", "--last", "1")["line"]
    assert line["content_bytes"] == 0 and line["sent_bytes"] < 64 * 1024
    assert line["known_bytes"] > 0 and line["known_bytes"] + line["zero_bytes"] == line["offered_bytes"]


def write_small(disk, pieces, random_bytes, stride=128 * 1024):
    """6 KiB in each stride, at a multiple of 1 KiB. Returns the number of bytes."""
    places = range(0, len(disk) - stride + 1, stride)
    for at in places:
        at += pieces.randrange(32) * 1024
        disk[at : at + 6144] = random_bytes()
    return len(places) * 6144


@pytest.mark.parametrize("chunk", ["4K", "64K"])
def test_a_small_write_sends_only_the_changed_part(coldrise, site, tmp_path, chunk):
    far = site("far", "--chunk-size", chunk)
    far.pair(coldrise, "far", "--prefix", "north-")
    pieces = random.Random(13)
    path, disk = tmp_path / "vda.raw", bytearray(pieces.randbytes(12 * MIB))

    def copied(day):
        path.write_bytes(disk)
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", point)
        expected[point] = {"vda": bytes(disk)}
        return coldrise.json("copy", "--to", "far")["line"]

    expected = {}
    assert copied(1)["delta_bytes"] == 0
    changed = write_small(disk, pieces, lambda: pieces.randbytes(6144))
    line = copied(2)
    assert line["unchanged_bytes"] + line["known_bytes"] + line["content_bytes"] == 12 * MIB
    # Content that cannot be compressed: the rest is names (here of all chunks there in a changed chunk here), questions and TLS.
    assert abs(line["content_bytes"] - line["delta_bytes"] - changed) < changed // 100
    assert line["sent_bytes"] < changed * (1.08 if chunk == "4K" else 1.04) + 16 * 1024, line
    # Text, which can.
    changed = write_small(disk, pieces, lambda: " ".join(pieces.choices(["here", "there", "elsewhere"], k=2000)).encode()[:6144])
    assert copied(3)["sent_bytes"] < changed * 0.6
    # A larger disk, with an unaligned end: the content behind the base is complete.
    disk += pieces.randbytes(MIB + 512)
    write_small(disk, pieces, lambda: pieces.randbytes(6144))
    copied(4)
    check(far.program, expected, tmp_path, "north-web01")
    assert far.program.json("verify")["is_clean"]


def test_a_resumed_copy_sends_only_changes(coldrise, gated, tmp_path):
    clock = BothClocks(tmp_path)
    far = gated(environment=clock.environment())
    pieces = random.Random(17)
    disks = {"vda": bytearray(pieces.randbytes(12 * MIB)), "vdb": bytearray(pieces.randbytes(36 * MIB))}
    expected = {}
    for day in (1, 2):
        point = f"2026110{day}T100000Z"
        expected[point] = {name: bytes(disk) for name, disk in disks.items()}
        for name, disk in disks.items():
            (tmp_path / name).write_bytes(disk)
        coldrise.json("backup", "web01", *(f"{name}=raw:{tmp_path / name}" for name in disks), "--time", point)
        changed = sum(write_small(disk, pieces, lambda: pieces.randbytes(6144), 16 * 1024 + 128 * 1024) for disk in disks.values())
        if day == 1:
            coldrise.json("copy", "--to", "far")
    # Half a MiB is of the first disk.
    copy = far.held(coldrise, MIB, "--to", "far")
    far.let_note(clock)
    copy.kill()
    copy.communicate()
    far.gate.release()

    def is_done():
        # The site may still hold the machine for the one that was killed.
        done = coldrise.run("--json", "copy", "--to", "far")
        line.update(json.loads(done.stdout.splitlines()[-1])["line"])
        return done.returncode == 0

    line = {}
    wait_until(is_done, "the last copy")
    assert 0 < line["content_bytes"] < 48 * MIB and line["sent_bytes"] < changed
    assert line["content_bytes"] - line["delta_bytes"] < changed
    check(far.program, expected, tmp_path)


def test_a_link_with_a_prefix_sees_only_its_own_machines(coldrise, site, tmp_path):
    far = site()
    far.pair(coldrise, "mine", "--prefix", "north-")
    secret = Image(4 * MIB)
    secret.fill(0, 4 * MIB, "secret")
    path = secret.save(tmp_path / "secret.raw")
    far.program.json("backup", "south-web01", f"vda=raw:{path}")
    coldrise.json("backup", "web01", f"vda=raw:{path}")
    copied = coldrise.json("copy", "--to", "mine")
    # The equal content of the other machine is not revealed: all of it is sent, and stored once.
    assert copied["line"]["content_bytes"] == 4 * MIB and copied["stored_bytes"] == 0
    assert {a.split("/")[0] for a in addresses(far.program)} == {"south-web01", "north-web01"}
    # That of its own machines is known to it.
    coldrise.json("backup", "web02", f"vda=raw:{path}")
    assert coldrise.json("copy", "web02", "--to", "mine")["line"]["content_bytes"] == 0
    assert content(far.program, "north-web02/latest/vda", tmp_path) == path.read_bytes()


def test_a_site_has_one_link_per_kind(coldrise, site, tmp_path):
    """Else a removed link with a prefix would leave an older one without."""
    far = site()
    far.pair(coldrise, "all")
    far.pair(coldrise, "read", "--may", "fetch")
    assert far.pair(coldrise, "own", "--prefix", "own-")
    links = far.program.json("link", "list")["links"]
    assert {(link["may"], link["prefix"]) for link in links} == {("fetch", ""), ("send", "own-")}
    disk = tmp_path / "disk.raw"
    disk.write_bytes(random.Random(1).randbytes(MIB))
    coldrise.backup("web01", vda=disk)
    coldrise.json("copy", "--to", "all")
    assert {address.partition("/")[0] for address in addresses(far.program)} == {"own-web01"}
    far.program.json("link", "remove", next(link["name"] for link in links if link["may"] == "send"))
    for name in ("all", "own", "read"):
        wait_until(lambda name=name: coldrise.run("copy", "--to", name).returncode == 1, f"{name} has no right")


def test_mistakes_are_named(coldrise, far):
    refused = far.program.run("link", "invite", "other", "--prefix", "")
    assert refused.returncode == 2 and "see all machines" in refused.stderr, refused.stderr
    for way in ("--to", "--from"):
        refused = coldrise.run("copy", way, "fra")
        assert refused.returncode == 1 and "there is no link fra; there are: far" in refused.stderr, refused.stderr
        assert "no directory of this name" in refused.stderr and "init" not in refused.stderr
    code = ["--code", "0000-0000-0000-0000"]
    for command in (["link", "add", "a/b", far.address, *code], ["link", "invite", "a/b"], ["link", "remove", "a/b"],
                    ["link", "invite", "live"]):
        refused = coldrise.run(*command)
        assert refused.returncode == 2 and f'"{command[2]}" is not a link name' in refused.stderr, refused.stderr
        assert "machine name" not in refused.stderr
    for command in (["copy", "--to", "far"], ["copy", "--from", "far"], ["link", "invite", "other"]):
        for prefix in ("a/b", "-a", "a" * 63):
            refused = coldrise.run(*command, f"--prefix={prefix}")
            assert refused.returncode == 2 and f'"{prefix}" is not a prefix' in refused.stderr, refused.stderr
            assert f"{prefix}x" not in refused.stderr


def test_progress_of_a_slow_copy_matches_the_stored_data(coldrise, far, tmp_path):
    disk = tmp_path / "disk.raw"
    disk.write_bytes(random.Random(2).randbytes(18 * MIB))
    coldrise.backup("web01", vda=disk)
    done = coldrise.run("--json", "copy", "--to", "far", "--rate", "4M", "--retry", "0s", timeout_s=120)
    assert done.returncode == 0 and "trying again" not in done.stderr, done.stderr
    *progress, copied = map(json.loads, done.stdout.splitlines())
    assert copied["elapsed_ms"] > 4000 and copied["line"]["offered_bytes"] == 18 * MIB
    # Only stored data counts as done, though the names of all were sent in the first second.
    measured = [(event["done_bytes"], event["elapsed_ms"]) for event in progress if event["event"] == "progress"]
    assert all(done <= MIB + 4 * MIB * elapsed_ms // 1000 for done, elapsed_ms in measured), measured
    # Two connections carry a batch of 4 MiB each, and often both end at the same time.
    assert len({done for done, _ in measured}) >= 3 and measured[-1][0] == 18 * MIB, measured


def test_only_paired_sites_are_admitted(coldrise, far, site, tmp_path):
    refused = coldrise.run("link", "add", "second", far.address, "--code", "0000-0000-0000-0000")
    assert refused.returncode != 0 and "code" in refused.stderr
    taken = coldrise.run("link", "add", "far", far.address, "--code", far.invite("again"))
    assert taken.returncode != 0 and "already" in taken.stderr
    unknown = coldrise.run("copy", "--to", "nowhere")
    assert unknown.returncode != 0
    code = coldrise.run("link", "add", "typo", far.address, "--code", "xyz")
    assert code.returncode == 2
    (link,) = far.program.json("link", "list")["links"]
    far.program.json("link", "remove", link["name"])
    # The server has looked when the key is refused.
    wait_until(lambda: coldrise.run("copy", "--to", "far").returncode != 0, "the end of the link")
    refused = coldrise.run("copy", "--to", "far")
    assert "refuses the key" in refused.stderr and "link" in refused.stderr
    assert addresses(far.program) == set()
    far.stop()
    gone = coldrise.run("copy", "--to", "far")
    assert gone.returncode != 0 and far.address in gone.stderr


@pytest.mark.encrypted
def test_links_are_sealed(coldrise, tmp_path):
    with contextlib.closing(FarSite(tmp_path, is_encrypted=True)) as far:
        far.pair(coldrise)
    for program in (coldrise, far.program):
        for path in (program.repository / "links").iterdir():
            stored = path.read_bytes()
            assert path.stat().st_mode & 0o077 == 0 and b"127.0.0.1" not in stored and b"prefix" not in stored
    assert {path.name for path in (coldrise.repository / "links").iterdir()} == {"identity", "far.link"}


def test_a_copy_continues_after_a_lost_connection(coldrise, gated, tmp_path):
    far = gated()
    pieces = random.Random(8)
    path = tmp_path / "vda.raw"
    expected = {}
    for day in (1, 2):
        path.write_bytes(pieces.randbytes(8 * MIB))
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", point)
        expected[point] = {"vda": path.read_bytes()}
    copy = far.held(coldrise, 2 * MIB, "--to", "far")
    # Twice: in the first point, and in the second. A site that was never reached is not waited for.
    for point, count in zip(expected, (10 * MIB, None), strict=True):
        far.gate.wait_for_hold()
        wait_for_beginning(far.program, point)
        far.stop(signal.SIGKILL)
        assert addresses(far.program) == {f"web01/{before}" for before in expected if before < point}
        far.gate.hold_after(count)
        far.start()
    printed, message = copy.communicate(timeout=60)
    assert copy.returncode == 0, message
    assert message.count("trying again for") >= 2, message
    copied = json.loads(printed.splitlines()[-1])
    # Each point is announced once, and an existing point is not sent again.
    assert copied["points"] == 2 and copied["machines"][0]["already_there"] == 0
    assert 16 * MIB < copied["line"]["sent_bytes"] < 16 * MIB + 8 * MIB
    check(far.program, expected, tmp_path)


@pytest.mark.parametrize("chunk", ["16K", "64K"])
def test_disks_that_shrink_and_grow_are_copied(coldrise, site, tmp_path, chunk):
    pieces = random.Random(31)
    far = site("far", "--chunk-size", chunk)
    far.pair(coldrise)
    content_bytes, expected = bytearray(pieces.randbytes(6 * MIB)), {}
    # The disk's new size, and writes to it: also beyond the end of the smaller one.
    for day, size in enumerate([6 * MIB, 3 * MIB + 4096, 5 * MIB, 5 * MIB - 512, 512 * KIB], 1):
        content_bytes = content_bytes[:size] + bytes(max(0, size - len(content_bytes)))
        content_bytes[size // 2 : size // 2 + 9000] = pieces.randbytes(9000)
        (tmp_path / "vda.raw").write_bytes(content_bytes)
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", f"vda=raw:{tmp_path}/vda.raw", "--time", point)
        expected[point] = {"vda": bytes(content_bytes[:size])}
        assert coldrise.json("copy", "--to", "far")["points"] == 1, size
    check(far.program, expected, tmp_path)


def test_a_connection_lost_at_the_start_of_a_copy_is_retried(coldrise, gated, tmp_path):
    far, clock = gated(), BothClocks(tmp_path)
    coldrise.more = clock.environment()
    disk = tmp_path / "disk.raw"
    ends = Counter()
    for number, count in enumerate(range(500, 26_000, 2500)):
        disk.write_bytes(random.Random(count).randbytes(64 * KIB))
        coldrise.json("backup", f"web{number:02}", f"vda=raw:{disk}")
        far.gate.cut_after(count)
        copy = coldrise.start("copy", "--to", "far", f"web{number:02}", stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        said = ""
        for line in copy.stderr:
            said += line
            if "trying again for" in line:
                # In a second.
                clock.skip(1)
        assert far.gate.has_cut(), count
        # Only a site that was never reached is not waited for.
        refused = copy.wait() == 1 and "connecting to the other site" in said
        assert refused or copy.returncode == 0 and "trying again for" in said, (count, said)
        ends[refused] += 1
    assert ends[True] >= 2 and ends[False] >= 2, ends


@pytest.mark.parametrize("prefix", ["", "north-"])
@pytest.mark.parametrize("victim", ["source", "far"])
def test_a_partly_copied_point_resumes(coldrise, gated, tmp_path, prefix, victim):
    clock = BothClocks(tmp_path)
    far = gated(*(["--prefix", prefix] if prefix else []), environment=clock.environment())
    pieces = random.Random(11)
    disks = {"vda": pieces.randbytes(4 * MIB), "vdb": pieces.randbytes(8 * MIB)}
    for name, content_bytes in disks.items():
        (tmp_path / name).write_bytes(content_bytes)
    coldrise.json("backup", "web01", *(f"{name}=raw:{tmp_path / name}" for name in disks), "--time", "20261101T100000Z")
    # The first disk has arrived: only then the next one begins.
    copy = far.held(coldrise, 6 * MIB, "--to", "far", "--retry", "0s")
    address = f"{prefix}web01/20261101T100000Z"
    if victim == "source":
        copy.kill()
    else:
        # The received data is recorded periodically.
        far.let_note(clock)
        far.stop(signal.SIGKILL)
        far.start()
    copy.communicate()
    wait_until(lambda: not far.program.json("show", address)["is_reachable"], "the end of the line")
    # It survives a gc that removes everything that is not needed.
    far.program.json("gc", "--max-unused", "0")
    far.gate.release()
    copied = coldrise.json("copy", "--to", "far")
    assert copied["points"] == 1
    assert copied["read_bytes"] <= 8 * MIB and copied["line"]["sent_bytes"] < 8.5 * MIB
    check(far.program, {"20261101T100000Z": disks}, tmp_path, f"{prefix}web01")
    assert list((far.program.repository / "begun").iterdir()) == []
    assert far.program.json("verify")["is_clean"]


def test_a_full_drive_at_the_other_site_is_reported(coldrise, site, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24M", "small", small], check=True)
    try:
        made = FarSite(small)
        made.start()
        made.pair(coldrise)
        path = tmp_path / "vda.raw"
        with open(path, "wb") as file:
            file.write(os.urandom(32 * MIB))
        coldrise.json("backup", "web01", f"vda=raw:{path}")
        done = coldrise.run("copy", "--to", "far")
        assert done.returncode != 0 and "at the other site" in done.stderr and "space" in done.stderr, done.stderr
        assert addresses(made.program) == set()
        made.close()
    finally:
        subprocess.run(["umount", "-l", small], check=True)


@pytest.mark.parametrize("prefix", ["", "north-"])
def test_received_parts_of_a_point_are_not_sent_again(coldrise, gated, tmp_path, prefix):
    far = gated(*(["--prefix", prefix] if prefix else []))
    path = tmp_path / "vda.raw"
    path.write_bytes(random.Random(12).randbytes(12 * MIB))
    coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", "20261101T100000Z")
    # The middle of two batches of 4 MiB.
    copy = far.held(coldrise, 5 * MIB, "--to", "far")
    # The server ends in order, and keeps what has arrived of both.
    far.process.send_signal(signal.SIGTERM)
    far.gate.cut()
    far.gate.release()
    assert far.process.wait(timeout=DEADLINE_S) == 0
    far.start()
    line = finish(copy)["line"]
    # A batch of 4 MiB may have been in flight, in the buffers of the network.
    assert line["sent_bytes"] < 12 * MIB + 4.5 * MIB
    check(far.program, {"20261101T100000Z": {"vda": path.read_bytes()}}, tmp_path, f"{prefix}web01")
    assert far.program.json("verify")["is_clean"]

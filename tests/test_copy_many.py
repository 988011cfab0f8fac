"""Copies between several sites: many into one, one to several, and the first copy on a drive that is carried."""

import random
import subprocess

from support.cli import PROGRAM, Coldrise
from support.copies import addresses, check, content
from support.image import Image
from support.nbdserver import DEADLINE_S

MIB = 1 << 20


def other_source(tmp_path):
    program = Coldrise.encrypted(tmp_path, place=tmp_path / "other")
    program.repository.parent.mkdir()
    program.init()
    return program


def copying(program, *arguments):
    return subprocess.Popen([PROGRAM, "copy", *arguments], env=program.environment(), stdin=subprocess.DEVNULL,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end_all(processes):
    for process in processes:
        said, _ = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, said


def make_disk(path, seed, common):
    """8 MiB that all have, and 4 MiB of its own."""
    path.write_bytes(common + random.Random(seed).randbytes(4 * MIB))
    return path


def test_two_sources_into_one_repository_at_once(coldrise, site, tmp_path):
    common = random.Random(0).randbytes(8 * MIB)
    far, other = site(), other_source(tmp_path)
    disks = [make_disk(tmp_path / f"{seed}.raw", seed, common) for seed in (1, 2)]
    for program, name, disk in zip((coldrise, other), ("north", "south"), disks, strict=True):
        program.json("backup", "web01", f"vda=raw:{disk}")
        far.pair(program, "far", "--prefix", f"{name}-")
    end_all([copying(program, "--to", "far", "--rate", "4M") for program in (coldrise, other)])
    assert {a.split("/")[0] for a in addresses(far.program)} == {"north-web01", "south-web01"}
    for name, disk in zip(("north", "south"), disks, strict=True):
        assert content(far.program, f"{name}-web01/latest/vda", tmp_path) == disk.read_bytes()
    # What both have is stored once, though neither was told that it is there.
    stored = far.program.json("stats")["stored_bytes"]
    assert 16 * MIB <= stored < 17 * MIB, stored
    assert far.program.json("verify")["is_clean"]


def test_one_source_to_two_sites_at_once(coldrise, site, tmp_path):
    disk = make_disk(tmp_path / "vda.raw", 1, bytes(8 * MIB))
    point = "20261101T100000Z"
    coldrise.json("backup", "web01", f"vda=raw:{disk}", "--time", point)
    both = [site("paris"), site("rome", "--compression", "zstd:9")]
    for name, far in zip(("paris", "rome"), both, strict=True):
        far.pair(coldrise, name)
    end_all([copying(coldrise, "--to", name, "--rate", "2M") for name in ("paris", "rome")])
    for far in both:
        check(far.program, {point: {"vda": disk.read_bytes()}}, tmp_path)
    # Each has its own retention, and its own base for the next one.
    both[0].program.json("forget", f"web01/{point}")
    coldrise.json("backup", "web01", f"vda=raw:{disk}")
    bases = [coldrise.json("copy", "--to", name, "--last", "1")["machines"][0]["points"][0]["base"] for name in ("paris", "rome")]
    assert bases == [None, point]


def test_the_first_copy_is_carried_on_a_drive(coldrise, site, tmp_path):
    path = tmp_path / "vda.raw"
    image = Image(32 * MIB)
    image.write(0, random.Random(3).randbytes(24 * MIB))
    expected = {}

    def back_up(day):
        image.save(path)
        point = f"2026110{day}T100000Z"
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", point)
        expected[point] = {"vda": path.read_bytes()}
        return point

    back_up(1)
    second = back_up(2)
    # Here, onto the drive; there, from the drive, under the names that the link gives.
    drive = Coldrise.encrypted(tmp_path, place=tmp_path / "drive")
    drive.repository.parent.mkdir()
    drive.init("--chunk-size", "64K")
    coldrise.json("copy", "--to", drive.repository)
    far = site("far")
    from_drive = ["--from", drive.repository, "--from-passphrase-file", drive.passphrase_file]
    assert far.program.json("copy", *from_drive, "--prefix", "berlin-")["points"] == 2
    far.pair(coldrise, "far", "--prefix", "berlin-")
    first = coldrise.json("copy", "--to", "far")
    assert (first["points"], first["machines"][0]["already_there"]) == (0, 2)
    assert first["line"]["content_bytes"] == 0 and first["line"]["sent_bytes"] < 16 * 1024
    # The next backup finds its base there.
    image.write(MIB, random.Random(4).randbytes(128 * 1024))
    back_up(3)
    copied = coldrise.json("copy", "--to", "far")
    (point,) = copied["machines"][0]["points"]
    assert point["base"] == second and copied["line"]["sent_bytes"] < 256 * 1024
    check(far.program, expected, tmp_path, "berlin-web01")
    # And the same through a second drive, back: nothing is another machine.
    back = coldrise.json("copy", "--from", drive.repository)
    assert (back["points"], back["machines"][0]["already_there"]) == (0, 2)


def test_what_the_far_site_pruned_is_not_sent_again(coldrise, site, tmp_path):
    far = site()
    far.pair(coldrise)
    for day in range(1, 7):
        path = tmp_path / "vda.raw"
        path.write_bytes(random.Random(day).randbytes(2 * MIB))
        coldrise.json("backup", "web01", f"vda=raw:{path}", "--time", f"2026110{day}T100000Z")
    assert coldrise.json("copy", "--to", "far")["points"] == 6
    far.program.json("prune", "--keep-last", "2")
    far.program.json("gc", "--max-unused", "0")
    kept = {"web01/20261105T100000Z", "web01/20261106T100000Z"}
    assert addresses(far.program) == kept
    again = coldrise.json("copy", "--to", "far")
    assert (again["points"], again["line"]["content_bytes"]) == (0, 0)
    assert again["machines"][0]["passed_over"] == [f"2026110{day}T100000Z" for day in (1, 2, 3, 4)]
    # What is forgotten here stays there.
    coldrise.json("forget", "web01/20261106T100000Z")
    coldrise.json("copy", "--to", "far")
    assert addresses(far.program) == kept

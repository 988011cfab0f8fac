"""Copies between several sites: many into one, one to several, and the first copy on a drive that is carried."""

import random

from support.copies import addresses, check, content
from support.far_site import FarSite, finish
from support.image import Image

MIB = 1 << 20


def make_disk(path, seed, common):
    """4 MiB that all have, and 4 MiB of its own."""
    path.write_bytes(common + random.Random(seed).randbytes(4 * MIB))
    return path


def copy_at_once(copies):
    """Copies (site, gate, program, name of the link) that are all held in their middle at one time."""
    running = []
    for far, far.gate, program, name in copies:
        running.append(far.held(program, 2 * MIB, "--to", name))
    for _, gate, _, _ in copies:
        gate.release()
    for copy in running:
        finish(copy)


def test_two_sources_are_copied_into_one_repository_concurrently(coldrise, site, tmp_path):
    common = random.Random(0).randbytes(4 * MIB)
    far, other = site(), FarSite.repository(tmp_path, "other")
    disks = [make_disk(tmp_path / f"{seed}.raw", seed, common) for seed in (1, 2)]
    copies = []
    for program, name, disk in zip((coldrise, other), ("north", "south"), disks, strict=True):
        program.json("backup", "web01", f"vda=raw:{disk}")
        far.put_gate()
        far.pair(program, "far", "--prefix", f"{name}-")
        copies.append((far, far.gate, program, "far"))
    copy_at_once(copies)
    assert {a.split("/")[0] for a in addresses(far.program)} == {"north-web01", "south-web01"}
    for name, disk in zip(("north", "south"), disks, strict=True):
        assert content(far.program, f"{name}-web01/latest/vda", tmp_path) == disk.read_bytes()
    # Common content is stored once, though neither learned that it existed.
    stored = far.program.json("stats")["stored_bytes"]
    assert 12 * MIB <= stored < 13 * MIB, stored
    assert far.program.json("verify")["is_clean"]


def test_one_source_is_copied_to_two_sites_concurrently(coldrise, site, tmp_path):
    disk = make_disk(tmp_path / "vda.raw", 1, bytes(4 * MIB))
    point = "20261101T100000Z"
    coldrise.json("backup", "web01", f"vda=raw:{disk}", "--time", point)
    both = [site("paris"), site("rome", "--compression", "zstd:9")]
    for name, far in zip(("paris", "rome"), both, strict=True):
        far.put_gate()
        far.pair(coldrise, name)
    copy_at_once([(far, far.gate, coldrise, name) for name, far in zip(("paris", "rome"), both, strict=True)])
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
    drive = FarSite.repository(tmp_path, "drive", is_encrypted=True)
    coldrise.json("copy", "--to", drive.repository, "--to-passphrase-file", drive.passphrase_file)
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
    back = coldrise.json("copy", *from_drive)
    assert (back["points"], back["machines"][0]["already_there"]) == (0, 2)


def test_points_pruned_at_the_far_site_are_not_sent_again(coldrise, site, tmp_path):
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
    # Points forgotten here stay there.
    coldrise.json("forget", "web01/20261106T100000Z")
    coldrise.json("copy", "--to", "far")
    assert addresses(far.program) == kept

"""Copies over a line during gc, prune and backups at both sites."""

import random

from support.copies import addresses, content
from support.far_site import finish

KIB, MIB = 1 << 10, 1 << 20
POINTS, ROUNDS = 8, 4


def pruned(coldrise, keep):
    return coldrise.json("prune", "--keep-last", str(keep), "--gc", "--max-unused", "0")


def test_gc_and_prune_at_both_sites_during_a_copy(coldrise, site, tmp_path):
    far = site()
    far.put_gate()
    far.pair(coldrise)
    pieces = random.Random(23)
    disks = {"vda": bytearray(pieces.randbytes(3 * MIB // 2) + bytes(5 * MIB // 2)), "vdb": bytearray(pieces.randbytes(MIB))}
    expected = {}
    for number in range(POINTS):
        for disk in disks.values():
            # A gc removes the chunks of a base that its successor does not have.
            at = pieces.randrange(0, len(disk) - 900 * KIB, 4 * KIB)
            disk[at : at + 900 * KIB] = pieces.randbytes(900 * KIB)
        for name, disk in disks.items():
            (tmp_path / f"{name}.raw").write_bytes(disk)
        point = f"202611{number + 1:02}T100000Z"
        coldrise.json("backup", "web01", *(f"{name}=raw:{tmp_path}/{name}.raw" for name in disks), "--time", point)
        expected[f"web01/{point}"] = {name: bytes(disk) for name, disk in disks.items()}
    (tmp_path / "other.raw").write_bytes(pieces.randbytes(MIB))
    copy = far.held(coldrise, MIB, "--to", "far")
    removed, kept = {coldrise: 0, far.program: 0}, POINTS
    for _ in range(ROUNDS):
        # The copy is in the middle of a point, or between two.
        for program, other in ((coldrise, "other"), (far.program, "another")):
            made = program.json("backup", other, f"vda=raw:{tmp_path}/other.raw")["address"]
            for change in ("protect", "quarantine", "release", "unprotect"):
                assert program.json(change, made)["points"] == [made]
            program.json("gc", "--max-unused", "0")
        # There only bases stay; here points go that are still to be copied, and those that are bases.
        removed[far.program] += pruned(far.program, 1)["forgotten"]
        kept = max(5, kept - 1)
        removed[coldrise] += pruned(coldrise, kept)["forgotten"]
        assert copy.poll() is None
        far.gate.hold_after(pieces.randrange(MIB, 2 * MIB))
        far.gate.wait_for_hold()
    far.gate.release()
    finish(copy)
    assert all(removed.values()), removed
    there = addresses(far.program) & expected.keys()
    assert f"web01/202611{POINTS:02}T100000Z" in there
    coldrise.json("copy", "--to", "far", "--all")
    there |= addresses(far.program) & expected.keys()
    assert addresses(coldrise) & expected.keys() <= there
    for program in removed:
        for address in sorted(addresses(program) & expected.keys()):
            for disk, bytes_of_disk in expected[address].items():
                assert content(program, f"{address}/{disk}", tmp_path) == bytes_of_disk, (address, disk)
        assert program.json("verify")["is_clean"]
        # And once more, without concurrent commands.
        program.json("gc", "--max-unused", "0")
        assert program.json("verify")["is_clean"]

"""quarantine: untrusted points are quarantined, and everything else works."""

import json
import subprocess

import nbd
import pytest

from support.image import Image

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def points(coldrise, tmp_path):
    """Two points of two disks; the chunks of vda that only the second one has are damaged."""
    disk, other = Image(16 * MIB), Image(1 * MIB)
    # Enough for a file of the database of its own.
    disk.fill(0, 12 * MIB, "first")
    other.fill(0, 1 * MIB, "other")
    other.save(tmp_path / "vdb.raw")
    made = [coldrise.backup("web01", vda=disk.save(tmp_path / "vda.raw"), vdb=tmp_path / "vdb.raw")]
    before = set((coldrise.repository / "db").glob("*.sst"))
    disk.fill(2 * MIB, 4 * MIB, "second")
    made.append(coldrise.backup("web01", vda=disk.save(tmp_path / "vda.raw"), vdb=tmp_path / "vdb.raw"))
    new = set((coldrise.repository / "db").glob("*.sst")) - before
    (path,) = [file for file in new if 4 * MIB < file.stat().st_size < 5 * MIB]
    content = bytearray(path.read_bytes())
    content[100 * KIB] ^= 0x30
    path.write_bytes(content)
    return made


def answer(coldrise, *arguments, code):
    done = coldrise.run("--json", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def states(coldrise):
    (machine,) = coldrise.json("list")["machines"]
    return [point.get("quarantine") for point in machine["points"]]


def reasons(coldrise, *rules):
    pruned = coldrise.json("prune", "--dry-run", *rules)
    return [point["reasons"] for point in pruned["machines"][0]["points"]]


def test_a_damaged_point_is_quarantined_until_it_is_repaired(
    coldrise, points, nbdkit, mount, tmp_path
):
    good, bad = points
    assert answer(coldrise, "repair", code=1)["quarantined"] == []
    assert states(coldrise) == [None, None]
    mounted = mount()
    machine = mounted.folder / "web01"
    assert set(path.name for path in machine.iterdir()) > {point.split("/")[1] for point in points}
    assert answer(coldrise, "repair", "--quarantine", code=1)["quarantined"] == [bad]
    assert states(coldrise) == [None, "damaged"]
    assert "QUARANTINED" in coldrise.run("list").stdout
    assert "quarantined  damaged" in coldrise.run("show", bad).stdout

    # It is not offered, and nothing takes it for the newest.
    assert coldrise.json("show", "web01/latest")["address"] == good
    names = {path.name for path in machine.iterdir()}
    assert good.split("/")[1] in names and bad.split("/")[1] not in names
    assert (machine / "latest").readlink().name == good.split("/")[1]
    with nbdkit() as server:
        with pytest.raises(nbd.Error), server.connect(f"{bad}/vda"):
            pass
        with server.connect(f"{good}/vda"):
            pass
    refused = coldrise.run("publish", bad)
    assert refused.returncode == 1 and "quarantined (damaged)" in refused.stderr
    assert coldrise.run("boot", bad).returncode == 1
    # Its intact content can be restored.
    assert coldrise.run("restore", f"{bad}/vdb", tmp_path / "vdb-out.raw").returncode == 0
    assert (tmp_path / "vdb-out.raw").read_bytes() == (tmp_path / "vdb.raw").read_bytes()
    assert coldrise.run("publish", bad, "--force", "--name", "rescue").returncode == 0
    coldrise.json("unpublish", "rescue", "--discard")

    # It pushes nothing out.
    assert reasons(coldrise, "--keep-last", "1") == [["last 1", "newest backup"], ["quarantined"]]
    # A backup reads everything, heals, and a repair finds out.
    made = coldrise.json("backup", "web01", f"vda=raw:{tmp_path}/vda.raw", f"vdb=raw:{tmp_path}/vdb.raw")
    assert [disk["base"] for disk in made["disks"]] == [None, None]
    done = answer(coldrise, "repair", code=0)
    assert (done["released"], done["is_clean"]) == ([bad], True)
    assert states(coldrise) == [None, None, None]
    assert coldrise.run("restore", f"{bad}/vda", tmp_path / "vda-out.raw").returncode == 0
    assert bad.split("/")[1] in {path.name for path in machine.iterdir()}


def test_a_manual_quarantine_is_only_released_manually(coldrise, tmp_path):
    disk = Image(2 * MIB)
    disk.fill(0, 1 * MIB, "disk")
    path = disk.save(tmp_path / "vda.raw")
    only = coldrise.backup("web01", vda=path)
    coldrise.json("quarantine", "web01/latest")
    assert states(coldrise) == ["chosen"]
    coldrise.json("repair")
    assert states(coldrise) == ["chosen"]
    # The machine is still known, and says what it has.
    missing = coldrise.run("show", "web01/latest")
    assert missing.returncode == 1 and "(quarantined)" in missing.stderr
    assert coldrise.run("list", "web01").returncode == 0
    assert reasons(coldrise, "--keep-last", "1") == [["quarantined"]]
    coldrise.json("release", only)
    assert states(coldrise) == [None]
    assert coldrise.json("show", "web01/latest")["address"] == only
    # latest skips any number of quarantined points.
    more = [coldrise.backup("web01", vda=path) for _ in range(3)]
    coldrise.json("quarantine", *more[:2], more[2])
    assert coldrise.json("show", "web01/latest")["address"] == only
    assert coldrise.run("show", "web01/latest~1").returncode == 1
    coldrise.json("forget", more[2])


def test_release_accepts_the_address_given_to_quarantine(coldrise, tmp_path):
    disk = Image(MIB)
    disk.fill(0, MIB // 2, "disk")
    path = disk.save(tmp_path / "vda.raw")
    older, newer = (coldrise.backup("web01", vda=path) for _ in range(2))
    for address, point in (("web01/latest", newer), ("web01/latest~1", older)):
        assert coldrise.json("quarantine", address)["points"] == [point]
        assert coldrise.json("release", address)["points"] == [point]
        assert states(coldrise) == [None, None]
    coldrise.json("quarantine", older)
    # As unprotect does: done, and it says what is in quarantine.
    done = coldrise.run("release", "web01/latest")
    assert done.returncode == 0 and newer in done.stderr and older in done.stderr
    assert states(coldrise) == ["chosen", None]


def test_protect_and_quarantine_can_be_repeated(coldrise, tmp_path):
    disk = Image(MIB)
    disk.fill(0, MIB // 2, "disk")
    path = disk.save(tmp_path / "vda.raw")
    _, newer = (coldrise.backup("web01", vda=path) for _ in range(2))
    for command in ("protect", "unprotect", "quarantine", "release"):
        for _ in range(2):
            assert coldrise.json(command, "web01/latest")["points"] == [newer], command


def test_a_bitmap_is_not_used_with_a_quarantined_point(coldrise, tmp_path):
    raw, path = Image(4 * MIB), tmp_path / "vda.qcow2"
    raw.fill(0, 3 * MIB, "disk")
    raw.save(tmp_path / "vda.raw")
    for arguments in (
        ["convert", "-f", "raw", "-O", "qcow2", tmp_path / "vda.raw", path],
        ["bitmap", "--add", "-g", "65536", path, "since"],
    ):
        subprocess.run(["qemu-img", *map(str, arguments)], check=True)
    coldrise.json("backup", "web01", f"vda={path}")

    def incremental():
        (disk,) = coldrise.json("backup", "web01", f"vda={path}", "--bitmap", "since")["disks"]
        return disk["is_incremental"], disk["read_bytes"] > 0

    assert incremental() == (True, False)
    coldrise.json("quarantine", "web01/latest")
    assert incremental() == (False, True)
    # From the new one it counts again.
    assert incremental() == (True, False)

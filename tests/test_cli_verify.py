"""coldrise verify: damage is found, named, and never served."""

import json
import random
import time
from unittest.mock import ANY

import nbd
import pytest

from support.image import Image
from support.nbdserver import read_all

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def full(coldrise, tmp_path):
    """Two machines, two points each, a sealed session and one that goes on."""
    disk = Image(8 * MIB)
    disk.fill(0, 6 * MIB, "first")
    points = [coldrise.backup("web01", vda=disk.save(tmp_path / "vda.raw"))]
    disk.fill(1 * MIB, 64 * KIB, "second")
    points.append(coldrise.backup("web02", vda=disk.save(tmp_path / "vda.raw")))
    return points


def verify(coldrise, *arguments, code=0):
    done = coldrise.run("--json", "verify", *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def chunk_files(coldrise):
    """The database's large files: those with chunks."""
    files = [path for path in (coldrise.repository / "db").glob("*.sst")]
    return sorted(path for path in files if path.stat().st_size > 64 * KIB)


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def test_a_sound_repository_is_verified_whole(coldrise, full, nbdkit):
    coldrise.publish(full[0], "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(b"x" * 64 * KIB, 7 * MIB)
        coldrise.json("seal", "trial")
        handle.pwrite(b"y" * 4 * KIB, 0)
        # Beside a running machine.
        found = verify(coldrise)
    assert found["is_clean"] and found["affected"] == []
    assert (found["points"], found["sessions"], found["layers"]) == (3, 1, 2)
    assert found["chunks"] == (6 * MIB + 64 * KIB) // (16 * KIB)
    assert found["read_bytes"] > 6 * MIB

    text = coldrise.run("verify").stdout
    assert text.startswith("no damage in 388 chunks (") and "3 restore points, 1 session" in text
    only = verify(coldrise, "web01/latest~1")
    assert only["is_clean"] and only["chunks"] == 6 * MIB // (16 * KIB)
    assert verify(coldrise, "live/trial/vda")["layers"] == 2
    assert verify(coldrise, "--sample", "100%")["chunks"] == found["chunks"]
    assert coldrise.run("verify", "--sample", "0").returncode == 2
    assert coldrise.run("verify", "web01/latest/vdx").returncode == 1


def test_every_flipped_byte_of_a_chunk_file_is_found_and_named(coldrise, full, nbdkit):
    """Nothing wrong is served, and what cannot be read is what verify names."""
    with nbdkit() as server:
        expected = {}
        for point in full:
            with server.connect(f"{point}/vda") as handle:
                expected[point] = read_all(handle)
    files = chunk_files(coldrise)
    assert files
    chooser = random.Random(7)
    for _ in range(12):
        path = chooser.choice(files)
        offset = chooser.randrange(path.stat().st_size // 10 * 9)
        flip(path, offset)
        found = verify(coldrise, code=1)
        affected = {disk["disk"]: disk["ranges"] for disk in found["affected"]}
        with nbdkit() as server:
            for point in full:
                unreadable = set()
                with server.connect(f"{point}/vda") as handle:
                    for at in range(0, 8 * MIB, 16 * KIB):
                        try:
                            content = handle.pread(16 * KIB, at)
                        except nbd.Error:
                            unreadable.add(at)
                            continue
                        assert content == expected[point][at : at + 16 * KIB], (path, offset, at)
                named = {
                    at
                    for part in affected.get(f"{point}/vda", [])
                    for at in range(part["start"], part["end"], 16 * KIB)
                }
                assert named == unreadable, (path, offset)
        flip(path, offset)
    # What to do about it stands beside what was found, and only there.
    flip(path, offset)
    text = coldrise.run("verify").stdout
    assert "restore from a point that is not affected" in text and "coldrise repair" in text
    assert "damage found in" in text
    flip(path, offset)
    assert "restore from" not in coldrise.run("verify").stdout
    assert verify(coldrise)["is_clean"]


def test_a_damaged_layer_is_named_with_its_point(coldrise, full, nbdkit):
    coldrise.publish(full[0], "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(random.Random(1).randbytes(256 * KIB), 2 * MIB)
    sealed = coldrise.json("seal", "trial")["address"]
    (layer,) = [path for path in (coldrise.repository / "layers").iterdir()
                if path.stat().st_size > 256 * KIB]  # fmt: skip
    # Somewhere in the first captured blocks: slots fill from the front of a segment.
    damaged = None
    for offset in range(20 * KIB, 4 * MIB, 4 * KIB):
        flip(layer, offset)
        done = coldrise.run("--json", "verify")
        if done.returncode == 1:
            damaged = json.loads(done.stdout.splitlines()[-1])
            break
        flip(layer, offset)
    assert damaged is not None
    names = {disk["disk"]: disk["ranges"] for disk in damaged["affected"]}
    assert set(names) == {f"{sealed}/vda", "live/trial/vda"}
    for (part,) in names.values():
        assert part["end"] - part["start"] == 4 * KIB and part["start"] >= 2 * MIB
    (block,) = damaged["damaged_layers"]
    assert block["what"].startswith("1 captured block in a layer of ")
    assert str(layer) in block["reason"]
    text = coldrise.run("verify").stdout
    assert f"affected: {sealed}/vda: 4.0 KiB" in text and "damage found" in text
    assert "damaged: 1 captured block in a layer of" in text and str(layer) in text
    # What does not refer to it is sound.
    assert verify(coldrise, full[0])["is_clean"]
    # A layer that is gone: everything of the disk may be wrong.
    layer.unlink()
    gone = verify(coldrise, code=1)
    assert gone["damaged_layers"] and gone["damaged_layers"][0]["what"].startswith("a layer of ")
    names = {disk["disk"]: disk["ranges"] for disk in gone["affected"]}
    assert names[f"{sealed}/vda"] == [{"start": 0, "end": 8 * MIB}]


def test_a_damaged_session_document_hides_no_other(coldrise, full):
    coldrise.publish(full[0], "trial")
    coldrise.publish(full[1], "second")
    document = sorted((coldrise.repository / "live").glob("*/session.json"))[0]
    flip(document, 40)
    found = verify(coldrise, code=1)
    assert found["sessions"] == 1 and found["points"] == 2
    assert str(document.parent) in found["damaged_documents"][0]["what"]


def moment_after(coldrise, address):
    """The first full second after a point was stored, once it has come."""
    (point,) = [point for machine in coldrise.json("list")["machines"]
                for point in machine["points"] if point["address"] == address]  # fmt: skip
    second = point["created_at_ms"] // 1000 + 1
    while time.time() < second:
        time.sleep(0.02)
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


def test_only_what_is_new_is_read(coldrise, full, nbdkit, tmp_path):
    coldrise.publish(full[0], "old")
    with nbdkit() as server, server.connect("live/old/vda") as handle:
        handle.pwrite(random.Random(2).randbytes(64 * KIB), 7 * MIB)
    old = coldrise.json("seal", "old")["address"]
    coldrise.json("unpublish", "old", "--discard")
    since = moment_after(coldrise, old)
    found = verify(coldrise, "--since", since)
    assert (found["is_clean"], found["points"], found["chunks"], found["layers"]) == (True, 0, 0, 0)
    disk = Image(8 * MIB)
    disk.fill(0, 6 * MIB, "first")
    disk.fill(3 * MIB, 32 * KIB, "third")
    new = coldrise.backup("web01", vda=disk.save(tmp_path / "vda.raw"))
    found = verify(coldrise, "--since", since)
    assert (found["is_clean"], found["points"], found["chunks"], found["layers"]) == (True, 1, 2, 0)
    assert verify(coldrise, "--since", "1d") == verify(coldrise) | {"elapsed_ms": ANY}
    # A fold of the old point stores chunks now.
    coldrise.json("fold")
    assert verify(coldrise, "--since", since)["chunks"] == 2 + 64 * KIB // (16 * KIB)
    # Of old chunks nothing is read, whoever shares them.
    path = max(chunk_files(coldrise), key=lambda file: file.stat().st_size)
    flip(path, 1 * MIB)
    assert verify(coldrise, "--since", since)["is_clean"]
    everything = verify(coldrise, code=1)["affected"]
    assert {disk["disk"] for disk in everything} >= {f"{full[0]}/vda", f"{new}/vda"}
    assert coldrise.run("verify", "--since", "yesterday").returncode == 2
    assert coldrise.run("verify", "--since", "1d", "--sample", "5").returncode == 2

"""coldrise verify: damage is found, named, and never served."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import platform
import random
import re
import signal
import subprocess
import threading
import time
from unittest.mock import ANY

import nbd
import pytest

from support.image import Image
from support.nbdserver import read_all

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def full(coldrise, tmp_path):
    """Two machines, two points each, a sealed session and a running one."""
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


def test_an_intact_repository_is_verified_completely(coldrise, full, nbdkit):
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


def test_every_flipped_byte_of_a_chunk_file_is_found_and_named(coldrise, full, nbdkit, tmp_path):
    """No wrong data is served, and verify names exactly the unreadable parts."""
    # As long as all files of chunks are small and few, RocksDB reads from each of them for any
    # chunk, and damage to one costs the others, too.
    large = Image(9 * MIB)
    large.fill(0, 9 * MIB, "large")
    coldrise.backup("web03", vda=large.save(tmp_path / "large.raw"))
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
    # The advice follows each finding, and appears only there.
    flip(path, offset)
    text = coldrise.run("verify").stdout
    assert "restore from a point that is not affected" in text and "coldrise repair" in text
    assert "damage found: 1 chunk, " in text and "run coldrise verify" not in text, text
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
    repaired = coldrise.run("--json", "repair")
    assert repaired.returncode == 1
    lost = {disk["disk"] for disk in json.loads(repaired.stdout.splitlines()[-1])["lost"]}
    assert lost == {f"{sealed}/vda", "live/trial/vda"}
    # Points that do not refer to it are intact.
    assert verify(coldrise, full[0])["is_clean"]
    # A layer that is gone: everything of the disk may be wrong.
    layer.unlink()
    gone = verify(coldrise, code=1)
    assert gone["damaged_layers"] and gone["damaged_layers"][0]["what"].startswith("a layer of ")
    names = {disk["disk"]: disk["ranges"] for disk in gone["affected"]}
    assert names[f"{sealed}/vda"] == [{"start": 0, "end": 8 * MIB}]
    for _ in range(2):
        repaired = coldrise.run("repair", "--quarantine")
        assert repaired.returncode == 1 and f"lost: {sealed}/vda" in repaired.stdout


def test_a_damaged_session_document_does_not_hide_others(coldrise, full):
    coldrise.publish(full[0], "trial")
    coldrise.publish(full[1], "second")
    document = sorted((coldrise.repository / "live").glob("*/session.json"))[0]
    flip(document, 40)
    found = verify(coldrise, code=1)
    assert found["sessions"] == 1 and found["points"] == 2
    (damage,) = found["damaged_documents"]
    assert damage["what"] in ("live/trial", "live/second") and str(document) in damage["reason"]


def moment_after(coldrise, address):
    """Waits for the first full second after a point was stored, and returns it."""
    (point,) = [point for machine in coldrise.json("list")["machines"]
                for point in machine["points"] if point["address"] == address]  # fmt: skip
    second = point["created_at_ms"] // 1000 + 1
    while time.time() < second:
        time.sleep(0.02)
    return time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(second))


def test_only_new_data_is_read(coldrise, full, nbdkit, tmp_path):
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
    # No old chunk is read, whichever points share it.
    path = max(chunk_files(coldrise), key=lambda file: file.stat().st_size)
    flip(path, 1 * MIB)
    assert verify(coldrise, "--since", since)["is_clean"]
    everything = verify(coldrise, code=1)["affected"]
    assert {disk["disk"] for disk in everything} >= {f"{full[0]}/vda", f"{new}/vda"}
    assert coldrise.run("verify", "--since", "yesterday").returncode == 2
    assert coldrise.run("verify", "--since", "1d", "--sample", "5").returncode == 2


class Stuck:
    """A command that blocks at its first line of progress, because nothing reads it yet."""

    def __init__(self, coldrise, *arguments):
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(writing, b"\n" * 4096)
        os.set_blocking(writing, True)
        self.process = coldrise.start(
            "--json", *arguments, stdout=writing, stderr=subprocess.PIPE)  # fmt: skip
        os.close(writing)
        self.output = os.fdopen(reading)
        self.wait(lambda: any(self.is_writing(task) for task in self.tasks()))

    def wait(self, has_come):
        deadline = time.monotonic() + 60
        while not has_come():
            assert self.process.poll() is None and time.monotonic() < deadline
            time.sleep(0.005)

    def tasks(self):
        return pathlib.Path(f"/proc/{self.process.pid}/task").iterdir()

    @staticmethod
    def is_writing(task):
        # Its number, and as the first argument the standard output.
        try:
            call = (task / "syscall").read_text().split()
        except (FileNotFoundError, ProcessLookupError):
            # A thread that has ended.
            return False
        return call[:2] == [str(WRITE), "0x1"]

    def has_pending_signals(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        masks = re.findall(r"^(?:Shd|Sig)Pnd:\t(\w+)", status, re.MULTILINE)
        return any(int(mask, 16) for mask in masks)

    def interrupt(self):
        """Sends SIGINT, lets the command go on once it has it, and returns its end."""
        self.process.send_signal(signal.SIGINT)
        self.wait(lambda: not self.has_pending_signals())
        lines = self.output.read().strip().splitlines()
        messages = self.process.communicate(timeout=60)[1]
        return self.process.returncode, json.loads(lines[-1]), messages


WRITE = {"x86_64": 1, "aarch64": 64}[platform.machine()]


@pytest.mark.parametrize("arguments", [["verify"], ["verify", "--since", "1d"],
                                       ["repair", "--quarantine"]])  # fmt: skip
def test_ctrl_c_ends_it_immediately(coldrise, full, arguments):
    code, last, messages = Stuck(coldrise, *arguments).interrupt()
    assert (code, last["error"]["kind"]) == (130, "interrupted"), messages
    assert verify(coldrise)["is_clean"]


def progress_of(coldrise, *arguments):
    lines = coldrise.run("--json", *arguments).stdout.splitlines()
    events = [json.loads(line) for line in lines]
    return [line for line in events if line.get("event") == "progress"]


def test_captured_blocks_count_in_the_progress(coldrise, full, nbdkit):
    coldrise.publish(full[0], "trial")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        handle.pwrite(random.Random(4).randbytes(1 * MIB), 2 * MIB)
    first = progress_of(coldrise, "verify")[0]
    assert first["done_bytes"] == 0
    assert first["total_bytes"] >= 388 * 16 * KIB + 1 * MIB
    # A repair reads them as well.
    assert progress_of(coldrise, "repair")[0]["total_bytes"] == first["total_bytes"]
    quarantine = progress_of(coldrise, "repair", "--quarantine")
    assert quarantine[0]["total_bytes"] == first["total_bytes"]


def test_the_smallest_sample_reads_something(coldrise, full):
    for percent in ("0.0001", "5%"):
        found = verify(coldrise, "--sample", percent)
        assert 0 < found["chunks"] <= 32, percent


def test_since_in_the_future_is_refused(coldrise, full):
    later = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(time.time() + 3600))
    done = coldrise.run("verify", "--since", later)
    assert done.returncode == 2 and "is in the future" in done.stderr


def markers(coldrise):
    return sorted((coldrise.repository / "markers").iterdir())


@pytest.mark.parametrize("how", ["missing", "garbled", "empty", "a folder"])
def test_a_lost_marker_is_named_and_recreated(coldrise, full, how):
    coldrise.publish(full[0], "trial")
    there = markers(coldrise)
    assert len(there) == 3
    for path in there:
        match how:
            case "missing":
                path.unlink()
            case "garbled":
                flip(path, 60)
            case "empty":
                path.write_bytes(b"")
            case "a folder":
                path.unlink()
                path.mkdir()
    found = verify(coldrise, code=1)
    named = {damaged["what"] for damaged in found["damaged_markers"]}
    assert named == {f"the marker of {name}" for name in [*full, "live/trial"]}
    assert found["damaged_documents"] == [] and found["affected"] == []
    text = coldrise.run("verify").stdout
    assert f"damaged: the marker of {full[0]}: it " in text and "coldrise repair recreates it" in text
    # Readers of the points work.
    assert coldrise.run("stats").returncode == 0
    repaired = coldrise.json("repair")
    assert repaired["made_markers"] == 3 and repaired["is_clean"]
    assert markers(coldrise) == there
    assert verify(coldrise)["is_clean"]
    assert coldrise.json("repair")["made_markers"] == 0


def test_a_session_ends_with_a_folder_in_place_of_its_marker(coldrise, full):
    before = markers(coldrise)
    coldrise.publish(full[0], "trial")
    (marker,) = set(markers(coldrise)) - set(before)
    marker.unlink()
    (marker / "kept").mkdir(parents=True)
    assert "the marker of live/trial: it is a folder (move it away" in coldrise.run("verify").stdout
    coldrise.json("unpublish", "trial")
    # Its content is kept under another name.
    marker.with_suffix(".new").joinpath("kept").rmdir()
    coldrise.publish(full[0], "trial")
    coldrise.json("unpublish", "trial")
    coldrise.json("repair")
    assert markers(coldrise) == before and verify(coldrise)["is_clean"]


def test_a_damaged_marker_of_a_sealed_point_is_named_and_recreated(coldrise, full, tmp_path):
    coldrise.publish(full[0], "trial")
    before = markers(coldrise)
    sealed = coldrise.json("seal", "trial")["address"]
    new = [path for path in markers(coldrise) if path not in before]
    (marker,) = [path for path in new if not path.suffix]
    content = marker.read_bytes()
    # First it waits in its session, then it is in the catalog.
    for _ in range(2):
        flip(marker, 60)
        found = verify(coldrise, code=1)
        assert [damaged["what"] for damaged in found["damaged_markers"]] == [f"the marker of {sealed}"]
        coldrise.backup("web03", vda=tmp_path / "vda.raw")
        assert verify(coldrise)["is_clean"]
        assert len(marker.read_bytes()) == len(content)


def test_half_written_markers_after_a_crash_are_not_damage(coldrise, full):
    there = markers(coldrise)
    for path in there:
        path.rename(path.with_suffix(".new"))
    assert verify(coldrise)["is_clean"]
    # The next writer makes them, and tidies away what belongs to nothing.
    (coldrise.repository / "markers" / ("0" * 32 + ".new")).write_bytes(b"")
    coldrise.json("repair")
    assert markers(coldrise) == there


def test_verify_finds_no_damage_during_concurrent_changes(coldrise, full, tmp_path):
    """Points and sessions have their markers at every moment that a verify may see them."""
    disk = tmp_path / "vda.raw"
    done = threading.Event()
    found = []

    def keep_verifying():
        while not done.is_set():
            found.append(coldrise.run("--json", "verify", "--sample", "1"))

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        verifying = pool.submit(keep_verifying)
        for _ in range(6):
            address = coldrise.backup("web03", vda=disk)
            coldrise.publish(address, "passing")
            sealed = coldrise.json("seal", "passing")["address"]
            coldrise.json("unpublish", "passing")
            coldrise.json("forget", address, sealed)
        done.set()
        verifying.result()
    assert found
    for one in found:
        assert one.returncode == 0, one.stdout + one.stderr

"""coldrise stats: the space of each machine and each point, and the reclaimable space."""

import random

import pytest

from support.cli import Coldrise
from support.image import Image

MIB = 1 << 20
CHUNK = 16 << 10


def chunks(content):
    """The different chunks of a disk, without holes."""
    pieces = (bytes(content[at : at + CHUNK]) for at in range(0, len(content), CHUNK))
    return {piece for piece in pieces if any(piece)}


def by_address(stats):
    points = [point for machine in stats["by_machine"] for point in machine["points"]]
    return {point["address"]: point for point in points}


def without(contents, names):
    """The chunks of some points that no other point has."""
    others = [chunks(contents[name]) for name in contents if name not in names]
    return set().union(*(chunks(contents[name]) for name in names)).difference(*others)


@pytest.fixture
def contents(coldrise, tmp_path):
    """Random changes to two machines that began as one: {address: content}."""
    chooser = random.Random(5)
    contents = {}
    disks = {}
    disks["web01"] = Image(24 * MIB)
    disks["web01"].fill(0, 12 * MIB, "system")
    disks["db01"] = Image(24 * MIB)
    disks["db01"].write(0, disks["web01"].read(0, 12 * MIB))
    for day in range(1, 5):
        for machine, disk in disks.items():
            for _ in range(chooser.randrange(2, 6)):
                at = chooser.randrange(24 * MIB // CHUNK - 64) * CHUNK
                length = chooser.randrange(1, 64) * CHUNK
                disk.fill(at, length, chooser.random())
            if machine == "db01" and day > 2:
                # The content of web01, too.
                disk.write(20 * MIB, disks["web01"].read(0, MIB))
            path = disk.save(tmp_path / f"{machine}.raw")
            time = f"202611{day:02}T100000Z"
            made = coldrise.json("backup", machine, f"vda=raw:{path}", "--time", time)
            contents[made["address"]] = bytes(disk.content)
    return contents


def test_unique_counts_chunks_of_no_other_point(coldrise, contents):
    stats = coldrise.json("stats")
    found = by_address(stats)
    assert set(found) == set(contents)
    for address, content in contents.items():
        expected = len(without(contents, [address])) * CHUNK
        unique = found[address]["unique_stored_bytes"]
        # Noise takes a little more than its size; sizes are averages.
        assert expected <= unique <= expected * 1.1 + CHUNK, address
        stored = [content[at : at + CHUNK] for at in range(0, len(content), CHUNK)]
        assert found[address]["recoverable_bytes"] == sum(CHUNK for piece in stored if any(piece))
        assert found[address]["virtual_bytes"] == 24 * MIB
    for machine in stats["by_machine"]:
        name = machine["machine"]
        its = [address for address in contents if address.startswith(name)]
        different = len(set().union(*(chunks(contents[address]) for address in its))) * CHUNK
        saved = 100 * (1 - different / machine["recoverable_bytes"])
        assert machine["deduplication_percent"] == pytest.approx(saved, abs=0.01)
        # Noise does not compress.
        assert 0 <= machine["compression_percent"] <= 0.1
        expected = len(without(contents, its)) * CHUNK
        assert expected <= machine["unique_stored_bytes"] <= expected * 1.1 + CHUNK, name
        assert machine["unique_stored_bytes"] > sum(
            point["unique_stored_bytes"] for point in machine["points"]
        )
    assert stats["recoverable_bytes"] == sum(p["recoverable_bytes"] for p in found.values())
    all_chunks = set().union(*map(chunks, contents.values()))
    assert stats["chunks"] == len(all_chunks)
    one = coldrise.json("stats", "web01")
    assert one in stats["by_machine"]
    text = coldrise.run("stats", "db01").stdout
    assert all(address in text for address in contents if address.startswith("db01"))
    assert coldrise.run("stats", "web02").returncode == 1


def test_a_gc_returns_the_space_that_stats_report(coldrise, contents):
    before = coldrise.json("stats")
    assert before["reclaimable_bytes"] == 0
    machine = next(m for m in before["by_machine"] if m["machine"] == "web01")
    coldrise.json("forget", "--all", "web01")
    after = coldrise.json("stats")
    assert [m["machine"] for m in after["by_machine"]] == ["db01"]
    promised = machine["unique_stored_bytes"]
    # Gc keeps unreferenced chunks among a larger share of used ones.
    assert 0 < after["reclaimable_bytes"] <= promised * 1.1
    collected = coldrise.json("gc")
    assert collected["bytes_returned"] == pytest.approx(after["reclaimable_bytes"], rel=0.2)
    final = coldrise.json("stats")
    returned = after["occupied_bytes"] - final["occupied_bytes"]
    assert returned == pytest.approx(collected["bytes_returned"], abs=MIB)
    # Now db01's chunks are its own, those that web01 had too among them.
    (left,) = final["by_machine"]
    rest = [address for address in contents if address.startswith("db01")]
    kept = {address: contents[address] for address in rest}
    expected = len(without(kept, rest)) * CHUNK
    assert expected <= left["unique_stored_bytes"] <= expected * 1.1 + CHUNK


def test_sessions_and_captured_writes_count(coldrise, contents, nbdkit):
    found = by_address(coldrise.json("stats"))
    first = max(found, key=lambda address: found[address]["unique_stored_bytes"])
    assert found[first]["unique_stored_bytes"] > 0
    coldrise.publish(first, "trial")
    # The data under the session is not returned with the point.
    stats = coldrise.json("stats")
    assert stats["sessions"] == 1 and by_address(stats)[first]["unique_stored_bytes"] == 0
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        for number in range(8):
            handle.pwrite(random.Random(number).randbytes(MIB), 2 * number * MIB)
    sealed = coldrise.json("unpublish", "trial")["address"]
    stats = coldrise.json("stats")
    found = by_address(stats)
    assert 8 * MIB <= found[sealed]["unique_captured_bytes"] <= stats["captured_bytes"]
    assert found[sealed]["unique_stored_bytes"] == found[sealed]["unique_captured_bytes"]
    # Its chunks are those of the point that it was sealed from: now neither has them alone.
    assert found[first]["unique_stored_bytes"] == 0
    coldrise.json("forget", sealed)
    assert coldrise.json("stats")["reclaimable_bytes"] >= 8 * MIB


def test_stats_of_an_empty_and_of_a_full_repository(coldrise, contents):
    stats = coldrise.json("stats")
    parts = stats["database_bytes"] + stats["captured_bytes"] + stats["other_bytes"]
    assert stats["occupied_bytes"] == parts
    # Nothing but the directory's own block is left out of what du counts.
    counted = sum(path.lstat().st_blocks * 512 for path in coldrise.repository.rglob("*"))
    assert stats["occupied_bytes"] == pytest.approx(counted, abs=64 << 10)
    memory = stats["index_memory"]
    assert 0 < memory["reader_bytes"] < MIB
    assert memory["writer_bytes"] == stats["chunks"] * 3 // 2
    assert memory["reader_cache_bytes"] == 24 * MIB
    text = coldrise.run("stats").stdout
    for word in ("2 machines, 8 restore points, 0 sessions", "recoverable", "after deduplication",
                 "occupied on disk", "reclaimable", "kept unreferenced", "index in a reader", "UNIQUE"):  # fmt: skip
        assert word in text


def test_a_plan_needs_only_the_size(tmp_path):
    coldrise = Coldrise(tmp_path / "none")
    alone, named = (coldrise.json("plan", *size) for size in (["1.5T"], ["--protect", "1.5T"]))
    assert alone == named and alone["protect_bytes"] == 3 << 39
    for wrong in ([], ["1T", "--protect", "1T"], ["1.5"], ["0"]):
        assert coldrise.run("plan", *wrong).returncode == 2


def planned(coldrise, *arguments):
    return coldrise.json("plan", "--protect", *arguments)


def test_a_plan_follows_from_its_assumptions(tmp_path):
    """Without a repository; the shares are those of docs/decisions/0005."""
    coldrise = Coldrise(tmp_path / "nowhere")
    plan = planned(coldrise, "10T", "--change", "2%", "--keep", "11")
    assert plan["recoverable_bytes"] == 11 * 10 << 40
    assert plan["different_bytes"] == 12 << 40
    sizes = {entry["chunk_size_bytes"]: entry for entry in plan["chunk_sizes"]}
    assert list(sizes) == [4096 << step for step in range(7)]
    chunks = (12 << 40) // CHUNK
    found = sizes[CHUNK]
    assert found["index_bytes"] == chunks * 120
    assert found["occupied_bytes"] == pytest.approx((12 << 40) * 0.367 + chunks * 120, rel=1e-6)
    assert found["writer_memory_bytes"] == pytest.approx(chunks * 1.64, rel=1e-6)
    saved = 100 * (1 - found["occupied_bytes"] / plan["recoverable_bytes"])
    assert found["reduction_percent"] == pytest.approx(saved, abs=0.01)
    # The same as in the decision: 0.374 with the index.
    one = planned(coldrise, "1T", "--keep", "1", "--chunk-size", "16K")["chunk_sizes"]
    assert [entry["occupied_bytes"] / (1 << 40) for entry in one] == [pytest.approx(0.374, abs=0.001)]
    best = planned(coldrise, "1T", "--keep", "1", "--compression", "zstd:9")["chunk_sizes"]
    assert best[-1]["occupied_bytes"] < one[0]["occupied_bytes"]
    text = coldrise.run("plan", "--protect", "1T").stdout
    assert "assumed: 30 restore points of 1.0 TiB, each 5 % different" in text
    for wrong in (["--chunk-size", "12K"], ["--change", "101"], ["--keep", "0"], ["--compression", "zstd:2"]):
        assert coldrise.run("plan", "--protect", "1T", *wrong).returncode == 2, wrong
    assert coldrise.run("plan").returncode == 2
    nothing = coldrise.run("plan", "--protect", "0")
    assert nothing.returncode == 2 and "nothing to protect" in nothing.stderr

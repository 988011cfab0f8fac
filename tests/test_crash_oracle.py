"""The crash test's oracle must be able to find fault."""

import contextlib
import os

import pytest

from support.crash.loopfs import LoopFileSystem
from support.crash.oracle import Clock, DiskOracle, PointOracle
from support.crash.stamp import BLOCK, FINE, ZERO, Garbage, read_stamp, stamp
from support.network import Network

COARSE = 8
SIZE = COARSE * BLOCK + 2 * BLOCK + 512


@pytest.fixture
def disk():
    return DiskOracle(Clock(), 1, "vda", SIZE, COARSE * BLOCK)


def content(disk, **changes):
    """The disk's bytes: zeroes but for cells given as c3=sequence."""
    cells = [bytes(disk.place(cell)[1]) for cell in range(disk.cells)]
    for name, sequence in changes.items():
        cell = int(name[1:])
        cells[cell] = disk.content(cell, 1, sequence)
    return b"".join(cells)


def write(disk, first, sequence, count=1, **how):
    done = disk.begin_write(first, count, sequence, **how)
    disk.end_write(done, succeeded=True)
    return done


def flush(disk):
    disk.end_flush(disk.begin_flush())


def faults(violations):
    return [(violation.disk, violation.offset) for violation in violations]


def test_a_stamp_is_distinguished_from_other_content():
    cell = stamp(1, 4096, BLOCK, 7)
    assert len(cell) == BLOCK and read_stamp(1, 4096, cell) == 7
    assert read_stamp(1, 4096, bytes(BLOCK)) == ZERO
    older = stamp(1, 4096, BLOCK, 6)
    wrong = [
        read_stamp(1, 4096, cell[:512] + older[512:]),
        read_stamp(1, 4096, cell[:-1] + bytes([cell[-1] ^ 1])),
        read_stamp(1, 8192, cell),
        read_stamp(2, 4096, cell),
        read_stamp(1, 4096, b"\1" * BLOCK),
        read_stamp(1, 4096, bytes(512) + cell[512:]),
        read_stamp(1, 4096, stamp(1, 4096, FINE, 7) * (BLOCK // FINE)),
    ]
    assert all(isinstance(found, Garbage) for found in wrong)


def test_a_missing_flushed_write_is_detected(disk):
    write(disk, 3, 10)
    assert disk.judge_crash(content(disk)) == []
    write(disk, 3, 11)
    flush(disk)
    assert faults(disk.judge_crash(content(disk))) == [("vda", 3 * BLOCK)]
    assert faults(disk.judge_crash(content(disk, c3=10))) == [("vda", 3 * BLOCK)]
    assert disk.judge_crash(content(disk, c3=11)) == []


def test_a_violation_names_place_and_cause(disk):
    write(disk, 3, 11, is_fua=True)
    (violation,) = disk.judge_crash(content(disk))
    said = str(violation)
    assert "vda" in said and "0x3000" in said and "sequence 11" in said and "durable" in said


def test_only_a_completed_sync_counts(disk):
    disk.begin_write(2, 1, 20, is_fua=True)
    write(disk, 3, 21)
    disk.begin_flush()
    disk.crashed()
    assert disk.judge_crash(content(disk)) == []


def test_a_flush_covers_only_completed_writes(disk):
    under_way = disk.begin_write(1, 1, 30)
    flush(disk)
    disk.end_write(under_way, succeeded=True)
    assert disk.judge_crash(content(disk)) == []
    flush(disk)
    # The found content counts as current and flushed.
    assert faults(disk.judge_crash(content(disk, c1=30))) == [("vda", BLOCK)]


def test_an_unanswered_write_may_or_may_not_have_happened(disk):
    write(disk, 1, 40)
    flush(disk)
    disk.begin_write(1, 1, 41)
    disk.crashed()
    assert disk.judge_crash(content(disk, c1=41)) == []
    assert disk.judge_crash(content(disk, c1=40)) == []
    flush(disk)
    assert faults(disk.judge_crash(content(disk, c1=41))) == [("vda", BLOCK)]


def test_answers_after_a_power_cut_do_not_count(disk):
    write(disk, 1, 45)
    under_way = disk.begin_write(2, 1, 46, is_fua=True)
    began = disk.begin_flush()
    disk.cut_power()
    disk.end_write(under_way, succeeded=True)
    disk.end_flush(began)
    disk.crashed()
    assert disk.judge_crash(content(disk)) == []
    write(disk, 1, 47, is_fua=True)
    assert disk.judge_crash(content(disk)) != []


def test_overlapping_writes_may_end_in_either_order(disk):
    first, second = disk.begin_write(1, 1, 50), disk.begin_write(1, 1, 51)
    disk.end_write(second, succeeded=True)
    disk.end_write(first, succeeded=True)
    flush(disk)
    assert disk.judge_crash(content(disk, c1=50)) == []
    flush(disk)
    assert disk.judge_crash(content(disk, c1=51)) != []


def test_content_that_was_never_written_is_detected(disk):
    write(disk, 1, 60)
    assert faults(disk.judge_crash(content(disk, c2=60))) == [("vda", 2 * BLOCK)]
    assert faults(disk.judge_crash(content(disk, c1=61))) == [("vda", BLOCK)]
    torn = bytearray(content(disk, c1=60))
    torn[BLOCK + 512 : BLOCK + 1024] = bytes(512)
    assert faults(disk.judge_crash(bytes(torn))) == [("vda", BLOCK)]


def test_zeroes_count_as_writes(disk):
    write(disk, 1, 70)
    write(disk, 1, ZERO)
    flush(disk)
    assert disk.judge_crash(content(disk, c1=70)) != []
    assert disk.judge_crash(content(disk)) == []


def test_a_block_of_small_writes_is_never_torn(disk):
    cells = disk.coarse_cells
    write(disk, cells, 80)
    write(disk, cells + 1, 81)
    later = {f"c{cells + 1}": 81}
    # The second write read the block with the first one in it.
    assert faults(disk.judge_crash(content(disk, **later))) == [("vda", COARSE * BLOCK)]
    both = {f"c{cells}": 80, f"c{cells + 1}": 81}
    assert disk.judge_crash(content(disk, **both)) == []
    write(disk, cells, 82, count=2)
    half = {f"c{cells}": 82, f"c{cells + 1}": 81}
    assert faults(disk.judge_crash(content(disk, **half))) == [("vda", COARSE * BLOCK + FINE)]


def test_a_live_read_sees_completed_writes(disk):
    write(disk, 1, 90)
    began = disk.begin_read()
    write(disk, 1, 91)
    for sequence in (90, 91):
        assert disk.judge_read(disk.content(1, 1, sequence), BLOCK, began) == []
    assert faults(disk.judge_read(bytes(BLOCK), BLOCK, began)) == [("vda", BLOCK)]
    began = disk.begin_read()
    assert disk.judge_read(disk.content(1, 1, 90), BLOCK, began) != []


def test_a_sealed_point_is_consistent():
    clock = Clock()
    one = DiskOracle(clock, 1, "vda", SIZE, COARSE * BLOCK)
    two = DiskOracle(clock, 2, "vdb", SIZE, COARSE * BLOCK)
    write(one, 0, 100)
    began = clock.tick()
    write(one, 1, 101)
    write(two, 1, 102)
    ended = clock.tick()
    write(two, 2, 103)

    def judge(first, second):
        point = PointOracle([one, two], began, ended)
        return faults(point.judge([content(one, **first), content(two, **second)])[0])

    assert judge({"c0": 100}, {}) == []
    assert judge({"c0": 100, "c1": 101}, {}) == []
    assert judge({"c0": 100, "c1": 101}, {"c1": 102}) == []
    assert judge({}, {}) == [("vda", 0)], "it had ended before the seal was asked for"
    assert judge({"c0": 100}, {"c2": 103}) == [("vdb", 2 * BLOCK)], "it began after the seal"
    assert judge({"c0": 100}, {"c1": 102}) == [("vda", BLOCK)], "two instants"


def test_long_histories_are_compacted_correctly(disk):
    for sequence in range(200, 300):
        write(disk, 1, sequence)
        flush(disk)
    assert len(disk.histories[1]) < 10
    assert disk.judge_crash(content(disk, c1=298)) != []
    assert disk.judge_crash(content(disk, c1=299)) == []


def test_power_returns_although_another_namespace_holds_the_mount(tmp_path):
    system = LoopFileSystem(tmp_path, 32 << 20)
    with contextlib.closing(system):
        synced = system.mount_point / "synced"
        synced.write_text("kept")
        os.sync()
        for content in ("first", "second"):
            with contextlib.closing(Network()):
                system.cut_power()
                system.power_up()
                assert synced.read_text() == "kept"
                (system.mount_point / content).write_text(content)

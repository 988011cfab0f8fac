"""NBD: reads, writes, zeroes and trims, and the resulting extents."""

import concurrent.futures
import errno
import random

import nbd
import pytest

from support.image import Image
from support.nbdserver import block_status, read_all

pytestmark = pytest.mark.encrypted

MIB = 1 << 20
DATA, HOLE = 0, nbd.STATE_ZERO | nbd.STATE_HOLE


def test_a_point_reads_as_its_source_at_any_offset(point, image, nbdkit):
    choice = random.Random(1)
    with nbdkit().connect(f"{point}/vda") as handle:
        for _ in range(500):
            length = choice.randint(1, 200_000)
            offset = choice.randint(0, len(image) - length)
            assert bytes(handle.pread(length, offset)) == image.read(offset, length)
        for offset in (0, 1, MIB - 1, 8 * MIB - 1, len(image) - 1):
            assert bytes(handle.pread(1, offset)) == image.read(offset, 1)
        assert read_all(handle) == image.content


def test_holes_of_a_point_are_holes(point, image, nbdkit):
    with nbdkit().connect(f"{point}/vda") as handle:
        assert block_status(handle) == [
            (0, MIB, DATA),
            (MIB, 4 * MIB, HOLE),
            (5 * MIB, MIB, DATA),
            (6 * MIB, 2 * MIB, HOLE),
            (8 * MIB, 512, DATA),
        ]
        assert block_status(handle, 3 * MIB + 1, 10) == [(3 * MIB + 1, 10, HOLE)]


def test_the_debug_switch_logs_slow_requests(point, nbdkit):
    server = nbdkit(options=["-v", "-D", "coldrise.slow=1"])
    with server.connect(f"{point}/vda") as handle:
        handle.pread(512, 1024)
    assert "slow: pread count=512 offset=1024: " in server.messages()


def test_captured_writes_are_data_and_trims_are_holes(live, image, nbdkit):
    """Captured zeroes take no space: a mirror must not allocate them."""
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"x" * 4096, 2 * MIB)
        handle.pwrite(b"y", 3 * MIB + 5000)
        handle.trim(8192, 5 * MIB)
        handle.zero(4096, 4096)
        handle.zero(4096, 7 * MIB)
        found = block_status(handle)
    data = [(at, length) for at, length, flags in found if flags == DATA]
    assert data == [
        (0, 4096),
        (8192, MIB - 8192),
        (2 * MIB, 4096),
        (3 * MIB + 4096, 4096),
        (5 * MIB + 8192, MIB - 8192),
        (8 * MIB, 512),
    ]
    assert [(at, length) for at, length, flags in found if flags == HOLE] == [
        (4096, 4096),
        (MIB, MIB),
        (2 * MIB + 4096, MIB),
        (3 * MIB + 8192, 2 * MIB),
        (6 * MIB, 2 * MIB),
    ]


def test_a_request_for_one_extent_returns_one(point, nbdkit):
    with nbdkit().connect(f"{point}/vda") as handle:
        seen = []
        handle.block_status(
            8 * MIB,
            0,
            lambda _context, _at, entries, _error: seen.extend(entries),
            flags=nbd.CMD_FLAG_REQ_ONE,
        )
        assert seen == [MIB, DATA]


def test_a_point_refuses_every_change(point, image, nbdkit):
    with nbdkit().connect(f"{point}/vda", strict=False) as handle:
        for change in (
            lambda: handle.pwrite(b"x" * 512, 0),
            lambda: handle.zero(512, 0),
            lambda: handle.trim(4096, 0),
        ):
            with pytest.raises(nbd.Error) as refused:
                change()
            assert refused.value.errnum in (errno.EPERM, errno.EROFS, errno.EINVAL)
        assert read_all(handle) == image.content


def test_requests_beyond_the_end_of_the_disk_are_refused(live, image, nbdkit):
    with nbdkit().connect(live, strict=False) as handle:
        for offset in (len(image), len(image) - 100, 1 << 62):
            with pytest.raises(nbd.Error):
                handle.pread(512, offset)
            with pytest.raises(nbd.Error):
                handle.pwrite(b"x" * 512, offset)
        assert read_all(handle) == image.content


def change(handle, model, choice):
    """One random change of the disk and of its model."""
    size = len(model)
    length = choice.choice([1, 511, 4096, 4097, 65536, choice.randint(1, 150_000)])
    offset = choice.randint(0, size - length)
    if choice.random() < 0.4:
        offset -= offset % 4096
    kind = choice.choice(["write", "write", "write", "zero", "zero", "trim"])
    flags = nbd.CMD_FLAG_FUA if choice.random() < 0.1 else 0
    if kind == "write":
        data = choice.randbytes(length)
        handle.pwrite(data, offset, flags=flags)
        model.write(offset, data)
    elif kind == "zero":
        if choice.random() < 0.5:
            flags |= nbd.CMD_FLAG_NO_HOLE
        if choice.random() < 0.5:
            flags |= nbd.CMD_FLAG_FAST_ZERO
        handle.zero(length, offset, flags=flags)
        model.zero(offset, length)
    else:
        handle.trim(length, offset, flags=flags)
        model.trim(offset, length)


@pytest.mark.parametrize("seed", [11, 12, 13])
def test_random_changes_through_several_connections(live, image, seed, nbdkit):
    choice = random.Random(seed)
    server = nbdkit()
    with (
        server.connect(live) as first,
        server.connect(live) as second,
        server.connect(live) as third,
    ):
        handles = [first, second, third]
        for step in range(300):
            change(choice.choice(handles), image, choice)
            length = choice.randint(1, 100_000)
            offset = choice.randint(0, len(image) - length)
            got = bytes(choice.choice(handles).pread(length, offset))
            assert got == image.read(offset, length), (step, offset, length)
        first.flush()
        for handle in handles:
            assert read_all(handle) == image.content
        for at, length, flags in block_status(second):
            if flags != DATA:
                assert not any(image.read(at, length)), (at, length)
    # The session is closed and opened again by the next connection.
    with server.connect(live) as handle:
        assert read_all(handle) == image.content
    server.stop()
    with nbdkit().connect(live) as handle:
        assert read_all(handle) == image.content


def test_parallel_writers_of_one_session(live, image, nbdkit):
    """Neighbouring sub-block writes of different connections never lose one
    another, though they share their block."""
    server = nbdkit()
    writers, piece, rounds = 4, 256, 8
    span = MIB // 4

    def write(number):
        with server.connect(live) as handle:
            for turn in range(rounds):
                for at in range(number * piece, span, writers * piece):
                    handle.pwrite(bytes([number * rounds + turn + 1]) * piece, at)
            handle.flush()

    with concurrent.futures.ThreadPoolExecutor(writers) as pool:
        for done in [pool.submit(write, number) for number in range(writers)]:
            done.result()
    expected = b"".join(bytes([n * rounds + rounds]) * piece for n in range(writers))
    with server.connect(live) as handle:
        assert bytes(handle.pread(span, 0)) == expected * (span // len(expected))
        assert bytes(handle.pread(MIB, 5 * MIB)) == image.read(5 * MIB, MIB)


def test_a_flush_on_one_connection_covers_the_others(live, nbdkit):
    server = nbdkit()
    with server.connect(live) as writer, server.connect(live) as flusher:
        writer.pwrite(b"one" * 1000, 12345)
        assert bytes(flusher.pread(3000, 12345)) == b"one" * 1000
        flusher.flush()
        server.kill()
    with nbdkit().connect(live) as handle:
        assert bytes(handle.pread(3000, 12345)) == b"one" * 1000


def test_a_prefetch_changes_nothing(live, image, nbdkit):
    for parameters in ([], ["chunk-cache=0"], ["chunk-cache=1M"]):
        server = nbdkit(*parameters)
        with server.connect(live) as handle:
            handle.cache(len(image), 0)
            handle.cache(1, len(image) - 1)
            assert read_all(handle) == image.content
        server.stop()


def test_the_largest_request(coldrise, tmp_path, nbdkit):
    big = Image(40 * MIB)
    point = coldrise.backup("big", vda=big.save(tmp_path / "big.raw"))
    live = coldrise.publish(point, "big")["vda"]
    data = random.Random(5).randbytes(32 * MIB)
    with nbdkit().connect(live) as handle:
        handle.pwrite(data, 4 * MIB + 1, flags=nbd.CMD_FLAG_FUA)
        assert bytes(handle.pread(32 * MIB, 4 * MIB + 1)) == data
        handle.zero(36 * MIB, 3 * MIB)
        assert not any(read_all(handle))

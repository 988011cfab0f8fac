"""A server was killed, and then a sector went: damage is named, and nothing reads as older data."""

import os
import struct

import nbd
import pytest

from support.nbdserver import refused, wait_until

BLOCK = 4096
BLOCKS = 16
# See "Layer files" in docs/on-disk-format.md.
RECORDS, SLOTS, MARKS = 64 << 10, 128 << 10, (4096, 8192)


def content(round_number):
    return bytes([round_number]) * BLOCK


def newest_mark(layer):
    """Its number, sequence and end."""
    with open(layer, "rb") as file:
        found = [os.pread(file.fileno(), 20, at) for at in MARKS]
    return max(struct.unpack("<QQI", mark) for mark in found)


@pytest.fixture
def killed(live, nbdkit, coldrise):
    """Each block was written twice, and flushed. The layer, and how many slots it has."""
    server = nbdkit()
    (layer,) = (coldrise.repository / "layers").iterdir()
    with server.connect(live) as handle:
        for round_number in (1, 2):
            for block in range(BLOCKS):
                handle.pwrite(content(round_number), block * BLOCK)
            handle.flush()
        # No client flushes from here on: the layer's own thread writes the mark.
        wait_until(lambda: newest_mark(layer)[2] >= 2 * BLOCKS, "the mark")
        server.kill()
    return layer, newest_mark(layer)[2]


def zero(file, offset, length):
    os.pwrite(file.fileno(), bytes(length), offset)


DAMAGES = {
    "a sector of zeroes": lambda file, slot: zero(file, (RECORDS + 64 * slot) // 512 * 512, 512),
    "a sector of something else": lambda file, slot: os.pwrite(
        file.fileno(), b"Z" * 512, (RECORDS + 64 * slot) // 512 * 512
    ),
    "a record": lambda file, slot: zero(file, RECORDS + 64 * slot, 64),
    "its first bytes": lambda file, slot: zero(file, RECORDS + 64 * slot, 8),
    "4 KiB of records": lambda file, slot: zero(file, RECORDS, 4096),
    "record and slot": lambda file, slot: (
        zero(file, RECORDS + 64 * slot, 64), zero(file, SLOTS + BLOCK * slot, BLOCK)
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_records_of_a_killed_session_are_named(killed, live, coldrise, nbdkit, damage):
    layer, slots = killed
    with open(layer, "r+b") as file:
        DAMAGES[damage](file, slots - 3)
    report = coldrise.run("--json", "verify")
    assert report.returncode == 1 and "live/trial" in report.stdout, report.stdout
    sealed = coldrise.run("seal", "trial")
    assert sealed.returncode == 1 and str(layer) in sealed.stderr, sealed.stderr
    assert len(coldrise.json("list")["machines"][0]["points"]) == 1
    server = nbdkit()
    refused(server, live)
    assert str(layer) in server.messages()


def test_a_lost_slot_is_an_error_and_others_stay_readable(killed, live, coldrise, nbdkit):
    layer, slots = killed
    with open(layer, "r+b") as file:
        zero(file, SLOTS + BLOCK * (slots - 1), 512)
    report = coldrise.run("--json", "verify")
    assert report.returncode == 1 and "live/trial" in report.stdout, report.stdout
    failed = []
    with nbdkit().connect(live) as handle:
        for block in range(BLOCKS):
            try:
                assert handle.pread(BLOCK, block * BLOCK) == content(2), block
            except nbd.Error:
                failed.append(block)
    assert len(failed) == 1, failed


def test_an_older_layer_is_refused_even_with_a_damaged_note(live, coldrise, nbdkit):
    (layer,) = (coldrise.repository / "layers").iterdir()
    with nbdkit().connect(live) as handle:
        handle.pwrite(content(1), 0)

    def is_closed():
        return not coldrise.json("sessions")["sessions"][0]["is_served"]

    wait_until(is_closed, "the close")
    older = layer.read_bytes()
    with nbdkit().connect(live) as handle:
        handle.pwrite(content(2), 0)
    wait_until(is_closed, "the close")
    notes = sorted((coldrise.repository / "live").glob("*/progress*"))
    assert len(notes) == 2
    newer = layer.read_bytes()
    for note in notes:
        kept = note.read_bytes()
        for damaged in (None, b"", kept[:-1] + bytes([kept[-1] ^ 1])):
            layer.write_bytes(older)
            note.unlink() if damaged is None else note.write_bytes(damaged)
            report = coldrise.run("--json", "verify")
            assert report.returncode == 1 and "older version" in report.stdout, report.stdout
            # One note is enough for the right layer, which is served.
            layer.write_bytes(newer)
            with nbdkit().connect(live) as handle:
                assert handle.pread(BLOCK, 0) == content(2)
                handle.pwrite(content(2), 0)
            wait_until(is_closed, "the close")
            # The document that notes the last write has rebuilt both.
            assert note.read_bytes() != damaged
            newer = layer.read_bytes()


def test_a_session_without_both_notes_is_damaged(live, coldrise, nbdkit):
    coldrise.json("seal", "trial")
    notes = list((coldrise.repository / "live").glob("*/progress*"))
    for note in notes:
        note.unlink()
    report = coldrise.run("--json", "verify")
    assert report.returncode == 1 and "live/trial" in report.stdout, report.stdout
    assert "copy of the repository" in report.stdout
    refused(nbdkit(), live)

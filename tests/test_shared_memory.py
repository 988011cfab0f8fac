"""/dev/shm is full: the server continues, and no reader sees a part of its block map."""

import json
import subprocess

import nbd
import pytest

from support.cli import PROGRAM
from support.memory import SmallSharedMemory
from support.nbdserver import refused

BLOCK = 4096
# Blocks whose entries share a page of the block map: one write into each takes all pages.
GROUP_BYTES = 1024 * BLOCK
GROUPS = 150


@pytest.fixture
def small():
    """Room for about a third of the pages."""
    memory = SmallSharedMemory(kib=256)
    yield memory
    memory.close()


@pytest.fixture
def scattered(coldrise, tmp_path):
    """The address of a point, and the export of its disk in a session, all holes."""
    with open(tmp_path / "disk.raw", "wb") as file:
        file.truncate(GROUPS * GROUP_BYTES)
    address = coldrise.backup("web01", vda=tmp_path / "disk.raw")
    return address, coldrise.publish(address, "trial")["vda"]


def content(group, round_number):
    return bytes([group % 251 + 1, round_number]) * (BLOCK // 2)


def write_all(handle, round_number):
    for group in range(GROUPS):
        handle.pwrite(content(group, round_number), group * GROUP_BYTES)
    handle.flush()


def assert_all(handle, round_number):
    for group in range(GROUPS):
        expected = content(group, round_number) + bytes(BLOCK)
        assert handle.pread(2 * BLOCK, group * GROUP_BYTES) == expected, group


def run_there(small, coldrise, *arguments):
    return subprocess.run(
        small.command(PROGRAM, "--json", *arguments), env=coldrise.environment(),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_server_continues_when_shared_memory_is_full(coldrise, scattered, nbdkit, small):
    address, live = scattered
    server, reader = nbdkit(wrap=small.command), nbdkit(wrap=small.command, options=["--readonly"])
    with server.connect(live) as handle:
        with reader.connect(live) as reading:
            handle.pwrite(content(0, 9), 0)
            assert reading.pread(BLOCK, 0) == content(0, 9)
            write_all(handle, 1)
            assert_all(handle, 1)
            # Its content is a part of the map from now on: refused, never shown.
            with pytest.raises(nbd.Error):
                reading.pread(BLOCK, (GROUPS - 1) * GROUP_BYTES)
        refused(reader, live)
        assert reader.process.poll() is None and "/dev/shm" in reader.messages()
        write_all(handle, 2)
        assert server.process.poll() is None
        server.kill()

    # The next one finds it full from the beginning, and one who reads an idle session does not care.
    with reader.connect(live) as reading:
        assert_all(reading, 2)
    server = nbdkit(wrap=small.command)
    with server.connect(live) as handle:
        assert_all(handle, 2)
        write_all(handle, 3)
        server.kill()

    done = run_there(small, coldrise, "seal", "trial")
    assert done.returncode == 0, done.stdout + done.stderr
    sealed = json.loads(done.stdout.splitlines()[-1])["address"]
    assert sealed == f"{address}+1"
    # With enough space all of it is shared again.
    writing, reading = nbdkit(), nbdkit(options=["--readonly"])
    with writing.connect(live) as handle, reading.connect(live) as other:
        write_all(handle, 4)
        assert_all(other, 4)
    with reading.connect(f"{sealed}/vda") as handle:
        assert_all(handle, 3)


def test_a_server_without_memory_for_its_map_reports_it(scattered, nbdkit, small):
    _, live = scattered
    filled = small.command("dd", "if=/dev/zero", "of=/dev/shm/other", "bs=4k", "status=none")
    subprocess.run(filled, check=False, capture_output=True)
    server, reader = nbdkit(wrap=small.command), nbdkit(wrap=small.command, options=["--readonly"])
    with server.connect(live) as handle:
        write_all(handle, 1)
        assert_all(handle, 1)
        refused(reader, live)
        assert "/dev/shm" in reader.messages()
    assert server.process.poll() is None


def test_verify_names_unreadable_files_and_continues(coldrise, scattered, nbdkit, small):
    _, live = scattered
    server = nbdkit(wrap=small.command)
    with server.connect(live) as handle:
        write_all(handle, 1)
        done = coldrise.run("--json", "verify")
        assert done.returncode == 3, done.stdout + done.stderr
        found = json.loads(done.stdout.splitlines()[-1])
        assert found["is_clean"] and found["chunks"] == 0 and found["points"] == 1
        (unread,) = found["unread"]
        assert live in unread["what"] and "/dev/shm" in unread["reason"]
        assert f"not verified: a layer of {live}: " in coldrise.run("verify").stdout
    server.stop()
    assert coldrise.json("verify")["unread"] == []

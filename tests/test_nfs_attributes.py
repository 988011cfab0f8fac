"""coldrise serve nfs: attributes that it remembers are never older than what they tell of.

Of a disk that this server alone writes it remembers them for seconds. So a change that it
does not see itself would stay hidden for as long, but for what these tests check.
"""

import time

import nbd
import pytest

from support import nfs3, nfs41
from support.nbdserver import wait_until

KIB, MIB = 1 << 10, 1 << 20

# As old as anything shown may be. It is remembered for ten times as long.
AT_ONCE_S = 0.5


@pytest.fixture
def client(live, nfs):
    server = nfs("--idle", "1")
    with server.connect() as client:
        client.server = server
        client.folder = client.walk(server.root(), "live/trial")
        yield client


# The clock of which the kernel takes the times of files: some milliseconds behind the other.
CLOCK_OF_FILES = 5  # CLOCK_REALTIME_COARSE


def now_ns():
    return time.clock_gettime_ns(CLOCK_OF_FILES)


def time_of(client, file):
    """The time of the last change, in nanoseconds."""
    seconds, nanoseconds = client.getattr(file)["mtime"]
    return seconds * 1_000_000_000 + nanoseconds


def shows(client, file, after):
    """Whether a change that was made after that moment shows."""
    deadline = time.monotonic() + AT_ONCE_S
    while True:
        # The last look begins after the deadline: on a busy machine the one before may have begun long before it.
        is_last = time.monotonic() >= deadline
        if time_of(client, file) >= after:
            return True
        if is_last:
            return False


def write_over_nfs(client, file, offset=0):
    start = now_ns()
    client.write(file, offset, b"nfs" * KIB, nfs3.FILE_SYNC)
    return start


def write_over_nbd(client, disk, connect):
    """Writes through another server once the session is no longer written here. All the
    while attributes are requested, so that recent ones are cached."""

    def written():
        time_of(client, disk)
        try:
            with connect() as other:
                start = now_ns()
                other.pwrite(b"nbd" * KIB, 0)
                return start
        except (nbd.Error, OSError):
            return None

    return wait_until(written, "the session to be given back")


def test_a_write_through_another_server_is_visible_immediately(client, live, nbdkit):
    disk = client.lookup(client.folder, "vda.raw")
    with nbdkit().connect(live) as other:
        for number in range(3):
            client.read(disk, 0, KIB)
            before = time_of(client, disk)
            time.sleep(0.05)
            start = now_ns()
            other.pwrite(b"nbd" * KIB, number * MIB)
            assert before < start and shows(client, disk, start)
            assert client.read(disk, number * MIB, 3 * KIB)[0] == b"nbd" * KIB


def test_a_write_through_another_file_of_the_disk_is_visible_immediately(client):
    files = [client.lookup(client.folder, name) for name in ("vda.raw", "vda-flat.vmdk", "vda.vhd")]
    for _ in range(2):
        for writer in files:
            for file in files:
                time_of(client, file)
            time.sleep(0.05)
            start = write_over_nfs(client, writer)
            for file in files:
                assert shows(client, file, start), (files.index(writer), files.index(file))


def test_the_writer_may_change_while_the_disk_is_read(client, live, nbdkit):
    disk = client.lookup(client.folder, "vda.raw")
    for _ in range(2):
        assert shows(client, disk, write_over_nfs(client, disk))
        other = nbdkit()
        assert shows(client, disk, write_over_nbd(client, disk, lambda: other.connect(live)))
        assert client.read(disk, 0, 3 * KIB)[0] == b"nbd" * KIB
        other.stop()


def test_another_server_may_write_right_after_a_close(client, live, nbdkit):
    disk = client.lookup(client.folder, "vda.raw")
    with nfs41.Client(client.server.network, "one") as one:
        opened = one.open("coldrise/live/trial/vda.raw")
        opened.write(b"nfs" * KIB)
        for _ in range(10):
            time_of(client, disk)
        opened.close()
        with nbdkit().connect(live) as other:
            start = now_ns()
            other.pwrite(b"nbd" * KIB, 0)
            assert shows(client, disk, start)


def test_a_seal_changes_no_visible_content(client, coldrise):
    disk = client.lookup(client.folder, "vda.raw")
    start = write_over_nfs(client, disk)
    before = client.getattr(disk)
    coldrise.json("seal", "trial")
    time.sleep(0.05)
    after = client.getattr(disk)
    assert after["size"] == before["size"] and time_of(client, disk) >= start
    start = write_over_nfs(client, disk, MIB)
    assert shows(client, disk, start)

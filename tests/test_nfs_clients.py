"""coldrise serve nfs: many clients connect and leave, and leak no resources."""

import concurrent.futures
import os
import pathlib
import re

from support import nfs3
from support.nbdserver import wait_until

KIB, MIB = 1 << 10, 1 << 20

CLIENTS, AT_ONCE, ROUNDS = 200, 20, 4
# Of memory, beyond the second round's: far less than 2 x 200 clients would take. On a busy machine more threads
# work concurrently in the second round than in the first, and each has a heap of its own.
GROWTH_BYTES = 4 * MIB


def descriptors(process):
    return len(os.listdir(f"/proc/{process}/fd"))


def resident_bytes(process):
    """Memory of the process alone: mapped files belong to the page cache."""
    status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(re.search(r"^RssAnon:\s+(\d+) kB$", status, re.M)[1]) * KIB


def come_and_go(server, number):
    """Mounts, reads, makes a block of its own durable, and disconnects without notice."""
    root = server.root()
    with server.connect() as client:
        disk = client.walk(root, "live/trial/vda.raw")
        at = number * 4 * KIB
        before, _ = client.read(disk, at, 4 * KIB)
        assert len(before) == 4 * KIB
        committed, _ = client.write(disk, at, b"%4d" % number * KIB, nfs3.FILE_SYNC)
        assert committed == nfs3.FILE_SYNC
        return disk


def test_clients_leak_neither_descriptors_nor_memory(live, image, nfs):
    server = nfs()
    process = server.ganesha()
    disk = come_and_go(server, 0)
    # The session's files stay open for a while after any client's use.
    open_before = descriptors(process)
    resident = []
    for _ in range(ROUNDS):
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda number: come_and_go(server, number), range(CLIENTS)))
        wait_until(lambda: descriptors(process) <= open_before, "the connections' end")
        resident.append(resident_bytes(process))
    assert resident[-1] - resident[1] <= GROWTH_BYTES, resident
    assert server.ganesha() == process, "it is the same one"
    for number in range(CLIENTS):
        image.write(number * 4 * KIB, b"%4d" % number * KIB)
    with server.connect() as client:
        assert client.read_all(disk) == image.content

"""coldrise serve nfs: who waits for a drive does not make others wait."""

import concurrent.futures
import os
import pathlib
import shutil
import signal

import pytest

from support import nfs3
from support.crash.syncs import Syncs
from support.nbdserver import read_all, wait_until

KIB = 1 << 10

# Of nfs-ganesha for requests, instead of 200.
THREADS = 4
WRITERS = 32


@pytest.fixture
def syncs(tmp_path):
    return Syncs(tmp_path)


@pytest.fixture
def server(live, nfs, syncs, tmp_path, monkeypatch):
    """A server with few threads, whose syncs can be held back."""
    wrapper = tmp_path / "bin" / "ganesha.nfsd"
    wrapper.parent.mkdir()
    wrapper.write_text(
        f"""#!/bin/sh
previous=
for word in "$@"; do
    [ "$previous" != -f ] || sed -i 's/^NFS_CORE_PARAM {{/&\\n    RPC_Ioq_ThrdMax = {THREADS};/' "$word"
    previous="$word"
done
export LD_PRELOAD={syncs.library} COLDRISE_TEST_SYNC={syncs.order}
exec {shutil.which("ganesha.nfsd")} "$@"
""",
        encoding="utf-8",
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    yield nfs()
    # Also where a test has failed: it could not end.
    syncs.work()


def write_stable(server, disk, number):
    with server.connect() as client:
        return client.write(disk, number * 4 * KIB, b"%4d" % number * KIB, nfs3.FILE_SYNC)


def test_stable_writes_wait_without_a_thread_and_share_syncs(server, syncs, image):
    with (
        server.connect() as client,
        concurrent.futures.ThreadPoolExecutor(WRITERS) as pool,
    ):
        client.rpc.connection.settimeout(20)
        disk = client.walk(server.root(), "live/trial/vda.raw")
        write_stable(server, disk, 0)
        before = syncs.count()
        with syncs.held_back():
            writes = [pool.submit(write_stable, server, disk, n) for n in range(WRITERS)]
            # All are written, and none is answered; a reader is.
            for number in range(WRITERS):
                data = b"%4d" % number * KIB
                image.write(number * 4 * KIB, data)
                at = number * 4 * KIB
                wait_until(lambda: client.read(disk, at, 4 * KIB)[0] == data, "a write to be done")
            assert client.getattr(disk)["size"] == len(image)
            assert not any(write.done() for write in writes), "it is not stable yet"
        answers = {write.result() for write in writes}
        assert {committed for committed, _ in answers} == {nfs3.FILE_SYNC}
        assert len({verifier for _, verifier in answers}) == 1
        assert syncs.count() - before < WRITERS / 4, "they share syncs"
        assert client.read_all(disk) == image.content


def test_a_failed_sync_fails_all_waiting_writes(server, syncs, image):
    before = server.ganesha()
    with server.connect() as client, concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        _, verifier = write_stable(server, disk, 0)
        image.write(0, b"%4d" % 0 * KIB)
        with syncs.held_back():
            writes = [pool.submit(write_stable, server, disk, n) for n in range(1, WRITERS)]
            # Each: a later one could reach the next server.
            for number in range(1, WRITERS):
                at, data = number * 4 * KIB, b"%4d" % number * KIB
                wait_until(lambda: client.read(disk, at, 4 * KIB)[0] == data, "a write to be done")
            # Nor do earlier ones get an error.
            with server.connect() as late, pytest.raises(OSError):
                syncs.fail()
                while True:
                    late.write(disk, 0, b"%4d" % 0 * KIB, nfs3.UNSTABLE)
            for write in writes:
                # No answer, rather than one that is not true.
                assert isinstance(write.exception(), OSError)
    wait_until(lambda: pathlib.Path(f"/proc/{before}").exists() is False, "its end")
    wait_until(lambda: server.ganesha() != before, "another nfs-ganesha")

    def sent_again():
        try:
            return {write_stable(server, disk, number) for number in range(1, WRITERS)}
        except OSError:
            return None

    answers = wait_until(sent_again, "the writes to be taken")
    assert {committed for committed, _ in answers} == {nfs3.FILE_SYNC}
    assert verifier not in {found for _, found in answers}
    for number in range(1, WRITERS):
        image.write(number * 4 * KIB, b"%4d" % number * KIB)
    with server.connect() as client:
        assert client.read_all(disk) == image.content


def test_the_server_exits_cleanly_while_writes_wait(server, syncs, live, image, nbdkit):
    with server.connect() as client, concurrent.futures.ThreadPoolExecutor(WRITERS) as pool:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        write_stable(server, disk, 0)
        with syncs.held_back():
            writes = [pool.submit(write_stable, server, disk, n) for n in range(WRITERS)]
            for number in range(WRITERS):
                at, data = number * 4 * KIB, b"%4d" % number * KIB
                wait_until(lambda: client.read(disk, at, 4 * KIB)[0] == data, "a write to be done")
                image.write(at, data)
            server.process.send_signal(signal.SIGTERM)
        server.stop()
        # Answered or not.
        concurrent.futures.wait(writes)
    with nbdkit().connect(live) as nbd:
        assert read_all(nbd) == image.content

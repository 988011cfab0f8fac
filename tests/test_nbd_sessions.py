"""NBD: who may write a session, and when it is open."""

import concurrent.futures

import nbd
import pytest

from support.nbdserver import read_all, refused, wait_until
from support.stopped import stopped


def leases(coldrise):
    return list((coldrise.repository / "leases").glob("lease-*"))


def test_two_servers_never_write_one_session(live, point, image, nbdkit):
    first, second = nbdkit(), nbdkit()
    with first.connect(live) as writer:
        writer.pwrite(b"mine", 100)
        refused(second, live)
        assert live in second.messages()
        # Everything else works there.
        with second.connect(f"{point}/vda") as reader:
            assert read_all(reader) == image.content
        writer.pwrite(b"still", 200)
        writer.flush()
        assert bytes(writer.pread(4, 100)) == b"mine"

    # The last connection took the session with it.
    def opened():
        try:
            with second.connect(live) as handle:
                return bytes(handle.pread(4, 100)) + bytes(handle.pread(5, 200))
        except nbd.Error:
            return None

    assert wait_until(opened, "the session to be free") == b"minestill"


def test_the_exit_of_a_killed_server_is_awaited(live, nbdkit):
    """It holds the session until its memory is gone. A stopped one simulates that: it
    listens, and answers nothing."""
    first, second = nbdkit(), nbdkit()
    with first.connect(live) as writer, concurrent.futures.ThreadPoolExecutor(1) as pool:
        writer.pwrite(b"flushed", 100, flags=nbd.CMD_FLAG_FUA)

        def read():
            with second.connect(live) as handle:
                return bytes(handle.pread(7, 100))

        with stopped(first.process.pid):
            reading = pool.submit(read)
            early = concurrent.futures.wait([reading], timeout=0.5).done
            first.kill()
        assert not early
        assert reading.result() == b"flushed"


def test_a_read_only_server_sees_writes_of_another(live, image, nbdkit):
    writing, reading = nbdkit(), nbdkit(options=["--readonly"])
    with writing.connect(live) as writer, reading.connect(live) as reader:
        assert reader.is_read_only()
        writer.pwrite(b"first", 1000)
        assert bytes(reader.pread(5, 1000)) == b"first"
        writer.pwrite(b"again", 1000)
        writer.trim(4096, 8192)
        assert bytes(reader.pread(5, 1000)) == b"again"
        assert not any(reader.pread(4096, 8192))
        image.write(1000, b"again")
        image.zero(8192, 4096)
        assert read_all(reader) == image.content


def test_an_idle_session_is_sealed_offline(coldrise, live, point, image, nbdkit):
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"sealed", 4000)
    assert coldrise.json("seal", "trial")["address"] == f"{point}+1"
    image.write(4000, b"sealed")
    with server.connect(live) as handle:
        assert read_all(handle) == image.content
        handle.pwrite(b"after", 4000)
    # The new point was never seen by this server before, and has not changed.
    with server.connect(f"{point}+1/vda") as handle:
        assert handle.is_read_only()
        assert read_all(handle) == image.content


def test_a_session_in_use_is_sealed_under_its_writer(coldrise, live, point, image, nbdkit):
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"before", 4000)
        assert coldrise.json("seal", "trial")["address"] == f"{point}+1"
        handle.pwrite(b"behind", 4000)
        assert bytes(handle.pread(6, 4000)) == b"behind"
        with server.connect(f"{point}+1/vda") as sealed:
            assert bytes(sealed.pread(6, 4000)) == b"before"
        with server.connect(f"{point}/vda") as original:
            assert read_all(original) == image.content


@pytest.mark.encrypted
def test_a_lease_lasts_as_long_as_its_server(coldrise, live, nbdkit):
    first = nbdkit()
    (own,) = leases(coldrise)
    with first.connect(live) as handle:
        assert handle.get_size() > 0
        assert b"trial" not in own.read_bytes(), "a lease tells names without the key"
    first.stop()
    assert leases(coldrise) == []

    killed = nbdkit()
    (stale,) = leases(coldrise)
    killed.kill()
    assert stale.exists()
    nbdkit()
    (fresh,) = leases(coldrise)
    assert fresh != stale


def test_sessions_end_with_their_server(coldrise, live, image, nbdkit):
    """On a signal, nbdkit waits for its clients, but leaves their exports to the
    plugin's cleanup."""
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"open", 5000)
        server.process.terminate()
    server.stop()
    assert leases(coldrise) == []
    image.write(5000, b"open")
    with nbdkit().connect(live) as handle:
        assert read_all(handle) == image.content


def test_serve_nbd_is_the_same_server(coldrise, live, tmp_path):
    socket = tmp_path / "served"
    process = coldrise.start("serve", "nbd", "--socket", socket, stdout=-1)
    try:
        assert process.stdout.readline().startswith("ready")
        handle = nbd.NBD()
        handle.set_export_name(live)
        handle.connect_unix(str(socket))
        handle.pwrite(b"served", 0, flags=nbd.CMD_FLAG_FUA)
        assert bytes(handle.pread(6, 0)) == b"served"
        handle.shutdown()
        process.terminate()
        process.wait(timeout=30)
    finally:
        process.kill()
        process.wait(timeout=30)
        process.stdout.close()


@pytest.mark.parametrize("count", [1, 8])
def test_connections_open_and_close(live, image, count, nbdkit):
    """Opening races with closing: every connection sees the complete session."""
    server = nbdkit()
    for turn in range(20):
        handles = []
        for _ in range(count):
            handle = server.handle(live)
            handle.connect_unix(str(server.socket))
            handles.append(handle)
        mark = f"turn {turn:4}".encode()
        handles[0].pwrite(mark, 777)
        assert bytes(handles[-1].pread(len(mark), 777)) == mark
        for handle in handles:
            handle.shutdown()
    image.write(777, mark)
    with server.connect(live) as handle:
        assert read_all(handle) == image.content

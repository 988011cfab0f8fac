"""publish, sessions, seal, unpublish and serve nbd."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import threading
import time

import nbd
import pytest

from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.ports import free_port
from support.stopped import stopped

MIB = 1 << 20


class Served:
    """`coldrise serve nbd` on a Unix socket."""

    def __init__(self, coldrise, path, *options):
        self.socket = path
        self.process = coldrise.start("--json", "serve", "nbd", "--socket", path, *options,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        line = self.process.stdout.readline()
        assert line, self.process.stderr.read()
        self.ready = json.loads(line)

    def connect(self, export):
        def connected():
            handle = nbd.NBD()
            handle.set_export_name(export)
            try:
                handle.connect_unix(str(self.socket))
            except nbd.Error as error:
                # nbdkit makes the socket a moment before it listens there.
                if error.errnum != errno.ECONNREFUSED:
                    raise
                return None
            return handle

        return wait_until(connected, "a server that listens")

    def stop(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        output, messages = self.process.communicate(timeout=30)
        return self.process.returncode, output, messages

    def crash(self):
        """Kills the program and the nbdkit that it started."""
        pids = self.children()
        assert pids
        self.process.kill()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate(timeout=30)

    def children(self):
        path = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        return [int(pid) for pid in pathlib.Path(path).read_text(encoding="utf-8").split()]


@pytest.fixture
def served(coldrise, tmp_path):
    servers = []

    def start(*options):
        servers.append(Served(coldrise, tmp_path / f"served{len(servers)}", *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


def test_publish_and_the_output_of_sessions(coldrise, image, point):
    began = time.monotonic()
    published = coldrise.json("publish", point, "--name", "trial")
    took_ms = (time.monotonic() - began) * 1000
    assert published["session"] == "trial" and published["address"] == point
    assert published["disks"] == [
        {"disk": "vda", "export": "live/trial/vda", "nfs_path": "/coldrise/live/trial/vda.raw",
         "size_bytes": len(image)}]
    assert 0 < published["elapsed_ms"] <= took_ms
    second = coldrise.json("publish", "web01/latest")
    assert second["session"] == "web01-1"
    assert coldrise.json("publish", "web01/latest")["session"] == "web01-2"
    sessions = coldrise.json("sessions")["sessions"]
    assert [session["session"] for session in sessions] == ["trial", "web01-1", "web01-2"]
    assert sessions[0]["address"] == point and not sessions[0]["is_served"]
    assert [session["captured_bytes"] for session in sessions] == [0, 0, 0]
    assert coldrise.json("show", "live/trial") == sessions[0]
    taken = coldrise.run("--json", "publish", point, "--name", "trial")
    assert taken.returncode == 1
    assert json.loads(taken.stdout)["error"]["kind"] == "already_exists"


def test_publish_prints_the_next_steps(coldrise, point):
    text = coldrise.run("publish", point, "--name", "trial").stdout
    assert "nbd://127.0.0.1:10809/live/trial/vda" in text
    assert "qemu-system-x86_64" in text and "coldrise boot live/trial" in text
    assert "coldrise serve nfs    (/coldrise/live/trial/vda.raw" in text
    assert "\x1b" not in text


def test_seal_while_served_and_while_idle(coldrise, image, point, served, tmp_path):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    image.fill(MIB, 4096, "one")
    served_session = coldrise.json("show", "live/trial")
    assert served_session["is_served"] and served_session["captured_bytes"] == 0
    client.pwrite(image.read(MIB, 4096), MIB)
    assert coldrise.json("show", "live/trial")["captured_bytes"] >= 4096
    first = coldrise.json("seal", "trial")
    assert first["session"] == "trial" and first["address"] == f"{point}+1"
    one = bytes(image.content)

    image.fill(3 * MIB, 4096, "two")
    client.pwrite(image.read(3 * MIB, 4096), 3 * MIB)
    client.flush()
    client.shutdown()
    assert server.stop()[0] == 0
    assert coldrise.json("seal", "live/trial")["address"] == f"{point}+2"

    for address, content in ((f"{point}+1", one), (f"{point}+2", bytes(image.content))):
        target = tmp_path / "out.raw"
        coldrise.json("restore", f"{address}/vda", target, "--force")
        assert target.read_bytes() == content
    listed = coldrise.json("list", "web01")["machines"][0]["points"]
    assert [(p["address"], p["kind"]) for p in listed] == [
        (point, "backup"), (f"{point}+1", "synthetic"), (f"{point}+2", "synthetic")]


def stands(server):
    """The nbdkit that serves does not run meanwhile."""
    (pid,) = server.children()
    return stopped(pid)


def test_an_abandoned_seal_never_appears(coldrise, point, served):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    client.pwrite(b"z" * 4096, 0)
    with stands(server) as pid:
        began = time.monotonic()
        seal = coldrise.start("--json", "seal", "trial", "--wait", "6",
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        waits = seal.stderr.readline()
        # It reports this after 2 s of waiting, long before its end; its start may take some seconds, too.
        reported = time.monotonic()
        assert str(pid) in waits and "trial" in waits
        output, _ = seal.communicate(timeout=30)
        ended = time.monotonic()
        assert ended - began > 5.9 and 1 < ended - reported < 20
        assert seal.returncode == 11 and json.loads(output)["error"]["kind"] == "busy"
        # The seal of a killed command is withdrawn like that, too.
        killed = coldrise.start("seal", "trial", stderr=subprocess.PIPE)
        assert str(pid) in killed.stderr.readline()
        killed.kill()
        killed.communicate(timeout=30)
    # Requests are answered in turn: the two before this one are settled.
    assert coldrise.json("seal", "trial")["address"] == f"{point}+1"
    client.pwrite(b"y" * 4096, 0)
    assert coldrise.json("seal", "trial")["address"] == f"{point}+2"
    client.shutdown()
    assert len(coldrise.json("list", "web01")["machines"][0]["points"]) == 3


def test_a_seal_succeeds_if_a_paused_server_resumes_in_time(coldrise, point, served):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    with stands(server) as pid:
        seal = coldrise.start("--json", "seal", "trial", stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        assert str(pid) in seal.stderr.readline()
    output, _ = seal.communicate(timeout=30)
    assert seal.returncode == 0 and json.loads(output)["address"] == f"{point}+1"
    client.shutdown()


def test_a_seal_succeeds_after_the_server_is_killed(coldrise, point, served):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    client.pwrite(b"z" * 4096, 0)
    client.flush()
    with stands(server) as pid:
        seal = coldrise.start("--json", "seal", "trial", stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE)
        assert str(pid) in seal.stderr.readline()
        server.crash()
    output, messages = seal.communicate(timeout=30)
    assert seal.returncode == 0, messages
    assert json.loads(output)["address"] == f"{point}+1"


def test_resume_after_a_kill(coldrise, image, point, served, tmp_path):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    image.fill(2 * MIB, 65536, "flushed")
    client.pwrite(image.read(2 * MIB, 65536), 2 * MIB)
    client.flush()
    server.crash()

    again = served()
    client = again.connect("live/trial/vda")
    assert bytes(client.pread(65536, 2 * MIB)) == image.read(2 * MIB, 65536)
    client.shutdown()
    again.stop()
    address = coldrise.json("unpublish", "trial")["address"]
    target = tmp_path / "out.raw"
    coldrise.json("restore", f"{address}/vda", target)
    assert target.read_bytes() == bytes(image.content)


def test_unpublish_seals_or_discards(coldrise, image, point, served):
    for name in ("kept", "empty", "dropped"):
        coldrise.publish(point, name)
    server = served()
    for name in ("kept", "dropped"):
        client = server.connect(f"live/{name}/vda")
        client.pwrite(b"x" * 4096, 0)
        client.flush()
        busy = coldrise.run("unpublish", name)
        assert busy.returncode == 11 and name in busy.stderr
        client.shutdown()
    server.stop()
    kept = coldrise.json("unpublish", "kept")
    assert kept["address"] == f"{point}+1" and not kept["discarded"]
    empty = coldrise.json("unpublish", "empty")
    assert empty["address"] is None and not empty["discarded"]
    dropped = coldrise.json("unpublish", "dropped", "--discard")
    assert dropped["address"] is None and dropped["discarded"]
    assert coldrise.json("sessions") == {"sessions": []}
    assert len(coldrise.json("list")["machines"][0]["points"]) == 2
    gone = coldrise.run("seal", "kept")
    assert gone.returncode == 1 and "kept" in gone.stderr
    assert image.read(0, 4096) != b"x" * 4096


def test_a_sealed_point_survives_the_next_backup(coldrise, image, point, served, tmp_path):
    coldrise.publish(point, "trial")
    server = served()
    client = server.connect("live/trial/vda")
    image.fill(0, 4096, "sealed")
    client.pwrite(image.read(0, 4096), 0)
    client.shutdown()
    server.stop()
    sealed = coldrise.json("unpublish", "trial")["address"]
    coldrise.backup("db01", vda=tmp_path / "vda.raw")
    target = tmp_path / "out.raw"
    coldrise.json("restore", f"{sealed}/vda", target)
    assert target.read_bytes() == bytes(image.content)
    shown = coldrise.json("show", sealed)
    assert (shown["kind"], shown["session"], f"web01/{shown['base']}") == ("synthetic", "trial", point)


def test_serve_accepts_clients_once_it_prints_ready(coldrise, point, served):
    server = served("--cache", "1M")
    assert server.ready["event"] == "ready"
    assert server.ready["uri"] == f"nbd+unix:///?socket={server.socket}"
    assert server.connect(f"{point}/vda").get_size() > 0
    assert server.socket.stat().st_mode & 0o022 == 0
    children = server.children()
    for pid in (server.process.pid, *children):
        limits = pathlib.Path(f"/proc/{pid}/limits").read_text(encoding="utf-8")
        assert re.search(r"Max core file size +0 +0 ", limits)
    code, output, messages = server.stop(signal.SIGINT)
    assert code == 0, messages
    assert json.loads(output.splitlines()[-1])["uri"] == server.ready["uri"]
    assert not server.socket.exists()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in children)


def test_serve_on_loopback(coldrise, point):
    port = free_port()
    process = coldrise.start("serve", "nbd", "--listen", f"127.0.0.1:{port}",
                             stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert re.match(rf"ready: nbd://127.0.0.1:{port}/", process.stdout.readline())
        handle = nbd.NBD()
        handle.connect_uri(f"nbd://127.0.0.1:{port}/{point}/vda")
        assert handle.is_read_only()
        handle.shutdown()
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 0


def test_serve_read_only(coldrise, point, live, served):
    client = served("--read-only").connect(live)
    assert client.is_read_only()
    assert len(client.pread(4096, 0)) == 4096


def test_serve_exits_although_a_client_stays_connected(coldrise, image, live, served, tmp_path):
    server = served()
    client = server.connect(live)
    image.fill(MIB, 65536, "not flushed")
    client.pwrite(image.read(MIB, 65536), MIB)
    server.process.send_signal(signal.SIGTERM)
    # The second one says that it is meant.
    code, _output, messages = server.stop(signal.SIGINT)
    assert code == 0, messages
    assert not server.socket.exists()
    target = tmp_path / "out.raw"
    coldrise.json("restore", live, target)
    assert target.read_bytes() == bytes(image.content)


def test_serve_ends_with_its_parent(coldrise, point, served):
    server = served()
    children = server.children()
    server.process.kill()
    server.process.communicate(timeout=30)
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "nbdkit's end")


def test_serve_refuses_a_used_socket_and_replaces_a_stale_one(coldrise, point, served, tmp_path):
    server = served()
    second = coldrise.run("serve", "nbd", "--socket", server.socket)
    assert second.returncode == 11 and str(server.socket) in second.stderr
    # The remains of a killed server do no harm.
    server.crash()
    assert server.socket.exists()
    again = Served(coldrise, server.socket)
    assert again.connect(f"{point}/vda").get_size() > 0
    assert again.stop()[0] == 0
    precious = tmp_path / "precious"
    precious.write_text("letter", encoding="utf-8")
    refused = coldrise.run("serve", "nbd", "--socket", precious)
    assert refused.returncode == 1 and precious.read_text(encoding="utf-8") == "letter"


def test_an_nbdkit_that_crashes_is_started_again(coldrise, point, served):
    """However often, and however soon after its start."""
    coldrise.json("publish", point, "--name", "trial")
    server = served()
    for turn in range(4):
        handle = wait_until(lambda: connected(server, "live/trial/vda"), "a connection")
        assert not turn or bytes(handle.pread(5, 4096)) == f"turn{turn - 1}".encode()
        handle.pwrite(f"turn{turn}".encode(), 4096)
        (process,) = server.children()
        os.kill(process, signal.SIGABRT)
        wait_until(lambda: process not in server.children(), "nbdkit's end")
    handle = wait_until(lambda: connected(server, "live/trial/vda"), "a connection")
    assert bytes(handle.pread(5, 4096)) == b"turn3"
    handle.shutdown()
    returncode, _, messages = server.stop()
    assert returncode == 0 and messages.count("started again") == 4


def connected(server, export):
    with contextlib.suppress(nbd.Error):
        return server.connect(export)


def test_a_server_without_its_repository_ends(coldrise, point, served, tmp_path):
    """Another try would not help: it says why."""
    server = served()
    gone = tmp_path / "gone"
    coldrise.repository.rename(gone)
    os.kill(*server.children(), signal.SIGKILL)
    _output, messages = server.process.communicate(timeout=30)
    assert server.process.returncode == 10 and str(coldrise.repository) in messages
    assert not server.socket.exists()


def test_a_failing_serve_never_reports_ready(coldrise, point, tmp_path):
    leases = coldrise.repository / "leases"
    shutil.rmtree(leases)
    # As on a failing drive: only the plugin, in nbdkit, reads it.
    leases.symlink_to(leases.name)
    done = coldrise.run("serve", "nbd", "--socket", tmp_path / "socket", timeout_s=30)
    assert (done.returncode, done.stdout) == (1, "") and str(leases) in done.stderr, done


def test_serve_without_nbdkit(coldrise, tmp_path):
    environment = coldrise.environment() | {"PATH": str(tmp_path)}
    done = subprocess.run([PROGRAM, "serve", "nbd", "--socket", tmp_path / "socket"],
                          env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "apt install nbdkit" in done.stderr


def test_two_writers_of_one_session(coldrise, live, served):
    first, second = served(), served()
    client = first.connect(live)
    client.pwrite(b"x" * 4096, 0)
    with pytest.raises(nbd.Error):
        second.connect(live)
    booting = coldrise.run("boot", "live/trial")
    assert booting.returncode == 11 and "trial" in booting.stderr
    client.shutdown()


def test_published_while_served(coldrise, point, served):
    server = served()
    assert server.connect(f"{point}/vda").get_size() > 0
    export = coldrise.publish(point, "later")["vda"]
    client = server.connect(export)
    client.pwrite(b"y" * 4096, 0)
    client.flush()
    client.shutdown()


def test_a_point_just_sealed_is_not_reported_as_lost(coldrise, point, served, tmp_path):
    """It is on its way into the catalog until the next backup."""
    machine = point.split("/")[0]
    served()
    coldrise.publish(point, "trial")
    sealed = [coldrise.json("seal", "trial")["address"]]
    coldrise.json("unpublish", "trial")
    listed = coldrise.run("--json", "list")
    assert json.loads(listed.stdout)["lost"] == []
    assert all(address in listed.stdout for address in sealed)
    older = coldrise.run("restore", f"{machine}/latest~1/vda", tmp_path / "older.raw")
    for done in (listed, older):
        assert done.returncode == 0 and "lost" not in done.stderr, done.stderr
    # Its absence is still noticed.
    for session in (coldrise.repository / "live").iterdir():
        if session.is_dir():
            shutil.rmtree(session)
    assert json.loads(coldrise.run("--json", "list").stdout)["lost"] == sealed


def test_concurrent_seals_create_different_points(coldrise, point, served):
    coldrise.publish(point, "trial")
    client = served().connect("live/trial/vda")
    client.pwrite(b"z" * 4096, 0)
    addresses = []

    def seal():
        addresses.append(coldrise.json("seal", "trial")["address"])

    threads = [threading.Thread(target=seal) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert sorted(addresses) == [f"{point}+{n}" for n in range(1, 5)]
    client.shutdown()


def test_consecutively_sealed_points_do_not_accumulate(coldrise, point, live):
    document = next((coldrise.repository / "live").glob("*/session.json"))
    longest = 0
    for _ in range(70):
        coldrise.json("seal", "trial")
        longest = max(longest, document.stat().st_size)
    # They entered the catalog meanwhile, and none is missing.
    assert document.stat().st_size < longest / 5
    points = coldrise.json("list", "web01")["machines"][0]["points"]
    assert len(points) == 71
    assert coldrise.json("seal", "trial")["address"].endswith("+71")


def test_one_damaged_copy_is_named_until_it_heals(coldrise, live, nbdkit):
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"w" * 4096, 0)
    server.stop()
    (copy,) = (coldrise.repository / "live").glob("*/progress-copy")
    for damage in (copy.unlink, lambda: copy.write_bytes(b"noise" * 20)):
        damage()
        found = coldrise.run("verify")
        assert found.returncode == 1 and f"damaged: live/trial: {copy}: " in found.stdout
        assert f"live/trial: {copy}: " in coldrise.run("doctor").stdout
        assert coldrise.run("fold").returncode == 0
        assert coldrise.json("verify")["is_clean"]


@pytest.mark.parametrize("name", ["progress", "progress-copy"])
def test_a_folder_in_place_of_a_copy_is_reported_as_damage(coldrise, point, live, name):
    (copy,) = (coldrise.repository / "live").glob(f"*/{name}")
    for _ in range(2):
        copy.unlink()
        copy.mkdir()
        found = coldrise.run("verify")
        assert found.returncode == 1 and f"damaged: live/trial: {copy}: " in found.stdout
        assert "warn  sessions" in coldrise.run("doctor").stdout
        assert coldrise.json("repair")["is_clean"]
        assert copy.is_file() and coldrise.json("verify")["is_clean"]
        coldrise.json("seal", "trial")
    # A folder that holds something is named, and nothing is removed.
    copy.unlink()
    (copy / "kept").mkdir(parents=True)
    assert "a folder is in place of this file" in coldrise.run("verify").stdout
    for _ in range(2):
        done = coldrise.run("seal", "trial")
        if done.returncode != 0:
            assert f"{copy}: a folder is in place of this file" in done.stderr, done.stderr
    copy.joinpath("kept").rmdir()
    coldrise.json("unpublish", "trial", "--discard")

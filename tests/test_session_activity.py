"""Client activity on the disks of served sessions: counts, sources, heat maps, events."""

import contextlib
import json
import os
import socket
import threading
import time

import nbd
import pytest

from support.nbdserver import wait_until
from support.stopped import stopped

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def two_disks(coldrise, image, tmp_path):
    """A session of two disks with this content."""
    path = image.save(tmp_path / "vda.raw")
    coldrise.backup("web01", vda=path, vdb=path)
    return coldrise.publish("web01/latest", "trial")


def session(service, part="/activity"):
    """Asked twice if need be: on a busy machine a server may be late for the one second in which it must answer."""
    shown = service.get(f"sessions/trial{part}")
    return service.get(f"sessions/trial{part}") if "does not answer" in shown.get("activity_missing", "") else shown


def disks(shown):
    return {disk["disk"]: disk["activity"] for disk in shown["disks"]}


def socket_of(coldrise):
    """The socket of the served session's counts."""
    [path] = (coldrise.repository / "live").glob("*/activity")
    return path


def reads(activity):
    return {name: activity[name] for name in
            ("from_backup_bytes", "from_cache_bytes", "from_captured_bytes", "zero_bytes")}  # fmt: skip


def hot(heat_map, kind):
    """The regions that are not cold, with their bytes."""
    return {index: count for index, count in enumerate(heat_map[kind]) if count}


def test_the_counts_match_the_requests(service, two_disks, nbdkit):
    server = nbdkit()
    before = time.time() * 1000
    with server.connect(two_disks["vda"]) as vda, server.connect(two_disks["vdb"]) as vdb:
        vda.pread(4 * KIB, 0)  # stored, decoded now
        vda.pread(4 * KIB, 4 * KIB)  # the same chunk
        vda.pread(8 * KIB, 2 * MIB)  # a hole
        for index in range(5):
            vda.pwrite(b"w" * 4 * KIB, 3 * MIB + index * 4 * KIB)
        vda.pread(20 * KIB + 512, 3 * MIB)  # captured, and a hole behind it
        vda.zero(64 * KIB, 6 * MIB)
        vda.trim(128 * KIB, 7 * MIB)
        vda.flush()
        vdb.pread(1 * KIB, 5 * MIB)

        shown = session(service)
        of_vda, of_vdb = disks(shown)["vda"], disks(shown)["vdb"]
        counts = {name: (of_vda[name]["operations"], of_vda[name]["bytes"], of_vda[name]["failed"])
                  for name in ("read", "write", "write_zeroes", "trim")}  # fmt: skip
        assert counts == {
            "read": (4, 36 * KIB + 512, 0),
            "write": (5, 20 * KIB, 0),
            "write_zeroes": (1, 64 * KIB, 0),
            "trim": (1, 128 * KIB, 0),
        }
        assert of_vda["flush"]["operations"] >= 1
        assert reads(of_vda) == {
            "from_backup_bytes": 4 * KIB,
            "from_cache_bytes": 4 * KIB,
            "from_captured_bytes": 20 * KIB,
            "zero_bytes": 8 * KIB + 512,
        }
        # The other disk's chunk is the same: each disk has its own counts, the cache is shared.
        assert (of_vdb["read"]["operations"], of_vdb["read"]["bytes"]) == (1, KIB)
        assert of_vdb["write"]["operations"] == of_vdb["flush"]["operations"] == 0
        for activity in (of_vda, of_vdb):
            for operation in ("read", "write", "write_zeroes", "trim", "flush"):
                figures = activity[operation]
                assert sum(figures["latency"]) == figures["operations"]
                assert figures["longest_us"] <= figures["total_us"] < 60_000_000
        # Reads from memory are not timed: one of a cached chunk, one of a hole.
        assert of_vda["read"]["latency"][0] == 2 and of_vda["read"]["longest_us"] > 0

        heat_map = of_vda["heat_map"]
        region = heat_map["region_bytes"]
        assert region == 16 * KIB and len(heat_map["written"]) == 513
        assert all(len(heat_map[kind]) == 513 for kind in ("from_backup", "from_cache", "from_captured"))
        first = 3 * MIB // region
        zeroed = dict.fromkeys(range(6 * MIB // region, 6 * MIB // region + 4), region)
        assert hot(heat_map, "written") == {first: 16 * KIB, first + 1: 4 * KIB, **zeroed}
        assert hot(heat_map, "from_captured") == {first: 16 * KIB, first + 1: 4 * KIB}
        assert hot(heat_map, "from_backup") == hot(heat_map, "from_cache") == {0: 4 * KIB}
        assert hot(of_vdb["heat_map"], "written") == {}
        one = {kind: hot(of_vdb["heat_map"], kind) for kind in ("from_backup", "from_cache")}
        assert one == {"from_backup": {5 * MIB // region: KIB}, "from_cache": {}}

        server_is = shown["server"]
        assert (server_is["program"], server_is["process"]) == ("nbdkit", server.process.pid)
        now = time.time() * 1000
        assert before - 1 <= server_is["opened_at_ms"] <= server_is["sampled_at_ms"] <= now + 1
        # Without the heat maps: the same counts.
        short = session(service, "")
        assert disks(short)["vda"] == {k: v for k, v in of_vda.items() if k != "heat_map"}
        # The list asks no server.
        assert "activity" not in service.get("sessions")["sessions"][0]["disks"][0]


def test_show_and_its_json_contain_the_totals(coldrise, live, nbdkit):
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        handle.pread(4 * KIB, 0)
        shown = coldrise.json("show", "live/trial")
        assert disks(shown)["vda"]["write"]["bytes"] == 4 * KIB
        text = coldrise.run("show", "live/trial").stdout
        assert "in use       nbdkit, process" in text and "4.0 KiB captured" in text


def test_a_seal_neither_resets_the_counts_nor_adds_to_them(coldrise, service, live, nbdkit):
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        before = disks(session(service, ""))["vda"]
        coldrise.json("seal", "trial")
        assert disks(session(service, ""))["vda"] == before
        # Sealed writes still count as captured.
        handle.pread(4 * KIB, 0)
        assert disks(session(service, ""))["vda"]["from_captured_bytes"] == 4 * KIB


def test_failed_requests_count_as_failed_only(service, live, nbdkit, coldrise):
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 64 * KIB, 0)
        handle.flush()
        for layer in (coldrise.repository / "layers").iterdir():
            with layer.open("r+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(64 * KIB)
                file.write(os.urandom(size - 64 * KIB))
        with pytest.raises(nbd.Error):
            handle.pread(64 * KIB, 0)
        activity = disks(session(service, ""))["vda"]
        assert activity["read"]["failed"] == 1
        assert activity["read"]["operations"] == activity["from_captured_bytes"] == 0


def test_a_file_of_a_mount_counts_too(service, live, mount):
    folder = mount() / "live/trial"
    descriptor = os.open(folder / "vda.raw", os.O_RDWR)
    try:
        os.pwrite(descriptor, b"w" * 4 * KIB, 2 * MIB)
        os.fsync(descriptor)
        shown = session(service)
        assert shown["server"]["program"] == "coldrise"
        activity = disks(shown)["vda"]
        assert activity["write"]["bytes"] == 4 * KIB and activity["flush"]["operations"] >= 1
        assert hot(activity["heat_map"], "written") == {2 * MIB // (16 * KIB): 4 * KIB}
    finally:
        os.close(descriptor)


def test_a_file_over_nfs_counts_too(service, live, nfs):
    server = nfs()
    done = server.network.run("qemu-io", "-f", "raw", "-c", "write 3M 96k", "-c", "flush",
                              server.uri("live/trial/vda.raw"))  # fmt: skip
    assert done.returncode == 0, done.stderr
    shown = session(service)
    assert shown["server"]["program"] == "ganesha.nfsd"
    activity = disks(shown)["vda"]
    assert activity["write"]["bytes"] == 96 * KIB and activity["flush"]["operations"] >= 1
    assert hot(activity["heat_map"], "written") == dict.fromkeys(range(192, 198), 16 * KIB)


def test_a_killed_server_leaves_no_counts(service, live, nbdkit):
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        assert session(service)["server"]
        server.kill()
    for part in ("", "/activity"):
        shown = session(service, part)
        assert shown["is_served"] is False
        assert "server" not in shown and "activity_missing" not in shown
        assert "activity" not in shown["disks"][0]
    # The next server begins at zero.
    with nbdkit().connect(live) as handle:
        handle.pread(KIB, 0)
        activity = disks(session(service, ""))["vda"]
        assert (activity["read"]["operations"], activity["write"]["operations"]) == (1, 0)


def test_a_stopped_server_is_reported_as_silent(service, live, nbdkit):
    server = nbdkit()
    with server.connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        with stopped(server.process.pid):
            shown = session(service)
        assert shown["is_served"] and "does not answer" in shown["activity_missing"]
        assert "server" not in shown and "activity" not in shown["disks"][0]
        assert session(service)["server"]


def test_a_server_without_an_activity_socket_is_reported(coldrise, service, live, nbdkit):
    """One of an older version has no socket."""
    with nbdkit().connect(live) as handle:
        handle.pread(KIB, 0)
        path = socket_of(coldrise)
        path.rename(path.with_name("gone"))
        for part in ("", "/activity"):
            shown = session(service, part)
            assert shown["is_served"] and "older version" in shown["activity_missing"]
            assert "server" not in shown and "activity" not in shown["disks"][0]
        assert "activity     unknown: " in coldrise.run("show", "live/trial").stdout
        path.with_name("gone").rename(path)


@contextlib.contextmanager
def impostor(path, answer):
    """Answers in place of the server of a session. `answer` gets the connection."""
    genuine = path.with_name("genuine")
    path.rename(genuine)
    with socket.socket(socket.AF_UNIX) as listener:
        folder = os.open(path.parent, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{folder}/activity")
        os.close(folder)
        listener.listen()

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    with connection, contextlib.suppress(OSError):
                        answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=30)
            path.unlink()
            genuine.rename(path)


def recorded(path):
    """A genuine answer."""
    with socket.socket(socket.AF_UNIX) as client:
        folder = os.open(path.parent, os.O_RDONLY)
        client.connect(f"/proc/self/fd/{folder}/activity")
        os.close(folder)
        client.sendall(b'"heat_maps"\n')
        return client.makefile("rb").readline()


def test_forged_answers_are_ignored(coldrise, service, live, nbdkit):
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        path = socket_of(coldrise)
        old = recorded(path)
        assert b"nbdkit" not in old and b"vda" not in old, "counts are encrypted"
        sealed = json.loads(old)["activity"]
        flipped = sealed[:-1] + ("0" if sealed[-1] != "0" else "1")
        plain = json.dumps({"program": "x", "disks": []}).encode().hex()
        answers = {
            b"garbage\n": "",
            b"": "",
            old[: len(old) // 2]: "",
            old: "older than the question",
            json.dumps({"activity": flipped}).encode() + b"\n": "",
            json.dumps({"activity": plain}).encode() + b"\n": "",
            json.dumps({"activity": "0" * (15 << 20)}).encode() + b"\n": "",
            b"x" * (17 << 20): "",
        }
        for answer, expected in answers.items():
            def reply(connection, answer=answer):
                connection.recv(100)
                connection.sendall(answer)

            with impostor(path, reply):
                shown = session(service)
                done = coldrise.run("show", "live/trial")
            assert shown["is_served"] and expected in shown["activity_missing"], answer[:40]
            assert "server" not in shown and "activity" not in shown["disks"][0]
            assert done.returncode == 0 and "activity     unknown: " in done.stdout
        assert session(service)["server"]


def test_an_invalid_request_has_no_side_effects(coldrise, service, live, nbdkit):
    with nbdkit().connect(live) as handle:
        path = socket_of(coldrise)
        for question in (b"\n", b'"everything"\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n", b""):
            with socket.socket(socket.AF_UNIX) as client:
                folder = os.open(path.parent, os.O_RDONLY)
                client.connect(f"/proc/self/fd/{folder}/activity")
                os.close(folder)
                client.sendall(question)
                client.shutdown(socket.SHUT_WR)
                assert client.recv(10) == b""
        handle.pwrite(b"w", 0)
        assert session(service)["server"]


@contextlib.contextmanager
def events(service, token=None):
    """The event stream. Call what it gives for the next event that `is_wanted`."""
    with contextlib.closing(service.connection("unix", timeout_s=60)) as stream:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        stream.request("GET", "/api/v1/events", headers=headers)
        response = stream.getresponse()

        def following(is_wanted):
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                line = response.readline().decode()
                if line.startswith("data:"):
                    event = json.loads(line[5:])
                    if is_wanted(event):
                        return event
            raise AssertionError("no event")

        yield following


def is_activity(event):
    return event.get("type") == "activity"


def test_activity_changes_are_sent(coldrise, service, live, nbdkit, image, tmp_path):
    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        with events(service) as following:
            first = following(is_activity)
            assert (first["session"], first["machine"]) == ("trial", "web01")
            assert (first["writes"], first["written_bytes"], first["reads"]) == (1, 4 * KIB, 0)
            handle.pread(KIB, MIB // 2)
            second = following(is_activity)
            assert (second["reads"], second["from_backup_bytes"]) == (1, KIB)
            assert second["opened_at_ms"] == first["opened_at_ms"]
            assert second["sampled_at_ms"] > first["sampled_at_ms"]
            # Without a change there is none: the next event is of another kind, three intervals later.
            unchanged_until = time.monotonic() + 6
            while time.monotonic() < unchanged_until:
                assert session(service, "")["server"]
                time.sleep(0.2)
            coldrise.backup("new01", vda=image.save(tmp_path / "new.raw"))
            new = following(lambda event: is_activity(event) or event.get("machine") == "new01")
            assert new["type"] == "machine"


def test_the_last_minutes_are_kept_without_a_client(service, live, nbdkit):
    def samples(is_last):
        history = service.get("sessions/trial/activity/history")
        return history if history and is_last(history[-1]) else None

    with nbdkit().connect(live) as handle:
        handle.pwrite(b"w" * 4 * KIB, 0)
        before = wait_until(lambda: samples(lambda last: last["written_bytes"] == 4 * KIB), "the write")
        handle.pread(KIB, MIB // 2)
        history = wait_until(lambda: samples(lambda last: last["reads"] == 1), "the read")
    assert history[:-1] == before, "one sample more"
    assert history[-1]["written_bytes"] == 4 * KIB
    times = [sample["sampled_at_ms"] for sample in history]
    assert times == sorted(set(times)) and history[0]["opened_at_ms"] == history[-1]["opened_at_ms"]
    token = service.token("operator", ["db*"])
    assert service.call("GET", "sessions/trial/activity/history", token=token).status == 404


def test_other_users_get_no_activity(service, coldrise, live, nbdkit, image, tmp_path):
    token = service.token("operator", ["db*"])
    assert service.call("GET", "sessions/trial/activity", token=token).status == 404
    with nbdkit().connect(live) as handle, events(service, token=token) as hidden:
        with events(service) as following:
            handle.pwrite(b"w", 0)
            assert following(is_activity)["session"] == "trial"
        coldrise.backup("db01", vda=image.save(tmp_path / "db.raw"))
        received = hidden(lambda event: is_activity(event) or event.get("machine") == "db01")
        assert received["type"] == "machine"

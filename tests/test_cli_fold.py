"""fold: sealed layers become chunks, without a visible difference."""

import fcntl
import random
import signal
import subprocess
import time

import pytest

from support.image import Image
from support.nbdserver import wait_until

MIB = 1 << 20


def layers(coldrise):
    folder = coldrise.repository / "layers"
    return {path.name: path.stat().st_blocks * 512 for path in folder.iterdir()}


def restored(coldrise, address, tmp_path):
    target = tmp_path / "restored.raw"
    target.unlink(missing_ok=True)
    coldrise.json("restore", address, target)
    return target.read_bytes()


def write_some(server, export, image, numbers, count=20):
    """Writes and zeroes at random, to a session's disk and to the model of it."""
    with server.connect(export) as handle:
        for _ in range(count):
            length = numbers.randrange(1, 200_000)
            offset = numbers.randrange(len(image) - length)
            if numbers.random() < 0.3:
                handle.zero(length, offset)
                image.zero(offset, length)
            else:
                data = numbers.randbytes(length)
                handle.pwrite(data, offset)
                image.write(offset, data)
        handle.flush()


@pytest.fixture
def live(coldrise, point):
    """Without time marks: fold leaves the layers to whose marks a session can go back."""
    return coldrise.publish(point, "trial", "--marks", "off")["vda"]


@pytest.fixture
def sealed(coldrise, live, nbdkit, image):
    """Three points, each sealed from the session after some writes, with their bytes."""
    numbers = random.Random(7)
    points = []
    server = nbdkit()
    for _ in range(3):
        write_some(server, live, image, numbers)
        points.append((coldrise.json("seal", "trial")["address"], bytes(image.content)))
    server.stop()
    return points


def test_every_point_restores_as_before_and_the_space_is_returned(
        coldrise, sealed, image, point, tmp_path):
    before = layers(coldrise)
    assert len(before) == 4
    done = coldrise.json("fold")
    assert [one["address"] for one in done["points"]] == [address for address, _ in sealed]
    assert (done["removed_layers"], done["served_sessions"]) == (3, 0)
    after = layers(coldrise)
    assert len(after) == 1
    assert done["removed_bytes"] == sum(before.values()) - sum(after.values())
    for address, content in sealed:
        assert restored(coldrise, f"{address}/vda", tmp_path) == content
    assert restored(coldrise, "live/trial/vda", tmp_path) == bytes(image.content)
    assert coldrise.json("verify")["is_clean"]
    again = coldrise.run("fold")
    assert again.stdout == "nothing to fold: no restore point has layers\n"
    coldrise.json("unpublish", "trial", "--discard")
    assert layers(coldrise) == {}


def test_readers_and_a_running_session_continue(coldrise, sealed, image, nbdkit, tmp_path):
    server, viewer = nbdkit(), nbdkit(options=["--readonly"])
    with server.connect("live/trial/vda") as live, viewer.connect("live/trial/vda") as view, \
            server.connect(f"{sealed[0][0]}/vda") as old:  # fmt: skip
        live.pwrite(b"w" * 4096, 5 * MIB)
        image.write(5 * MIB, b"w" * 4096)
        done = coldrise.json("fold")
        assert done["served_sessions"] == 0
        # The first layer is leased with the point, all of them by the viewer.
        assert (done["removed_layers"], len(layers(coldrise))) == (0, 4)
        with server.connect(f"{sealed[0][0]}/vda") as new:
            for reader in (old, new):
                assert reader.pread(len(image), 0) == sealed[0][1]
        live.pwrite(b"x" * 4096, MIB)
        live.flush()
        image.write(MIB, b"x" * 4096)
        for reader in (live, view):
            assert reader.pread(len(image), 0) == bytes(image.content)
        address = coldrise.json("seal", "trial")["address"]
    with server.connect("live/trial/vda") as live:
        coldrise.json("fold")
        # A server closes layers a moment after their reader has left; then the next writer removes them.
        wait_until(lambda: len(layers(coldrise)) == 1 or not coldrise.json("gc"), "the end of the folded layers")
        assert live.pread(len(image), 0) == bytes(image.content)
    for old_address, content in [*sealed, (address, bytes(image.content))]:
        assert restored(coldrise, f"{old_address}/vda", tmp_path) == content
    assert coldrise.json("verify")["is_clean"]


def test_points_that_cannot_be_folded_are_reported(coldrise, sealed, point):
    for address, message in [
        (point, "is a backup: it has no layers"),
        ("live/trial", "seal it (coldrise seal trial)"),
        (f"{point}/vda", "takes all disks of a restore point"),
    ]:
        refused = coldrise.run("fold", address)
        assert refused.returncode == 2
        assert message in refused.stderr
    assert coldrise.run("fold", "web01/20010101T000000Z").returncode == 1


def test_a_kill_at_any_moment_loses_nothing(coldrise, nbdkit, tmp_path):
    """A larger disk, so that the fold takes long enough to be killed."""
    numbers = random.Random(17)
    image = Image(32 * MIB)
    image.fill(0, 8 * MIB, "base")
    base = coldrise.backup("web02", vda=image.save(tmp_path / "large.raw"))
    live = coldrise.publish(base, "killed", "--marks", "off")["vda"]
    points = []
    server = nbdkit()
    for turn in range(8):
        if turn == 4:
            # Of an idle session afterwards.
            server.stop()
        if turn >= 4:
            server = nbdkit()
        write_some(server, live, image, numbers, count=60)
        if turn >= 4:
            server.stop()
        points.append((coldrise.json("seal", "killed")["address"], bytes(image.content)))
        process = coldrise.start("--quiet", "fold")
        # From no time at all to longer than a fold takes.
        time.sleep(turn % 4 * 0.1)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        address, content = numbers.choice(points)
        assert restored(coldrise, f"{address}/vda", tmp_path) == content
        assert restored(coldrise, live, tmp_path) == bytes(image.content)
    # A kill between point and session leaves the session over the layers, until a later point of it is folded.
    server = nbdkit()
    write_some(server, live, image, numbers, count=60)
    server.stop()
    points.append((coldrise.json("seal", "killed")["address"], bytes(image.content)))
    coldrise.json("fold")
    assert len(layers(coldrise)) == 1
    assert coldrise.json("verify")["is_clean"]
    for address, content in points:
        assert restored(coldrise, f"{address}/vda", tmp_path) == content


@pytest.fixture
def watching(coldrise):
    """Starts a fold in the background; each must end without an error on a signal."""
    started = []

    def start():
        started.append(coldrise.start("fold", "--watch", "--interval", "1", stdout=subprocess.DEVNULL))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=30) == 0


def layers_of(coldrise, address):
    return sum(disk["layers"] for disk in coldrise.json("show", address)["disks"])


# A fold in the background waits for all other work of the machine.
def until(condition, timeout_s=240):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def is_being_written(coldrise):
    with open(coldrise.repository / "writer.lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.fixture
def captured(coldrise, nbdkit, tmp_path):
    """A point sealed over another one: its captured writes take a while to fold."""
    disk = Image(160 * MIB)
    disk.fill(0, 1 * MIB, "disk")
    coldrise.publish(coldrise.backup("web01", vda=disk.save(tmp_path / "vda.raw")), "trial", "--marks", "off")
    with nbdkit() as server, server.connect("live/trial/vda") as handle:
        for at in range(0, 128 * MIB, 16 * MIB):
            content = random.Random(at).randbytes(16 * MIB)
            disk.write(at, content)
            handle.pwrite(content, at)
    return coldrise.json("seal", "trial")["address"], disk


def test_a_background_fold_yields_and_completes(coldrise, captured, watching, tmp_path):
    address, disk = captured
    small = Image(1 * MIB)
    small.fill(0, 1 * MIB, "small")
    small.save(tmp_path / "small.raw")
    watching()
    for _ in range(3):
        until(lambda: is_being_written(coldrise) or layers_of(coldrise, address) == 0)
        # Never refused with 11, though another process writes.
        coldrise.backup("db01", sda=tmp_path / "small.raw")
    until(lambda: layers_of(coldrise, address) == 0)
    assert restored(coldrise, f"{address}/vda", tmp_path) == bytes(disk.content)
    # Points sealed later are folded as well.
    coldrise.publish("db01/latest", "second", "--marks", "off")
    sealed = coldrise.json("seal", "second")["address"]
    until(lambda: layers_of(coldrise, sealed) == 0)


def test_a_background_fold_may_be_killed(coldrise, captured, watching, tmp_path):
    address, disk = captured
    for number in range(3):
        process = watching()
        until(lambda: is_being_written(coldrise) or layers_of(coldrise, address) == 0)
        time.sleep(number * 0.1)
        process.kill()
        process.wait()
        assert restored(coldrise, f"{address}/vda", tmp_path) == bytes(disk.content)
        assert coldrise.json("verify")["is_clean"]
    watching()
    until(lambda: layers_of(coldrise, address) == 0)
    assert restored(coldrise, f"{address}/vda", tmp_path) == bytes(disk.content)

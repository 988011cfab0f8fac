"""fold: sealed layers become chunks, and nobody sees a difference."""

import os
import random
import signal
import time

import pytest

from support.image import Image

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


def test_readers_and_a_running_session_go_on(coldrise, sealed, image, nbdkit, tmp_path):
    server = nbdkit()
    with server.connect("live/trial/vda") as live, server.connect(f"{sealed[0][0]}/vda") as old:
        done = coldrise.run("fold")
        assert done.returncode == 0
        assert "1 session is being served and keeps its layers" in done.stdout
        with server.connect(f"{sealed[0][0]}/vda") as new:
            for reader in (old, new):
                assert reader.pread(len(image), 0) == sealed[0][1]
        live.pwrite(b"x" * 4096, MIB)
        live.flush()
        image.write(MIB, b"x" * 4096)
        assert live.pread(len(image), 0) == bytes(image.content)
        address = coldrise.json("seal", "trial")["address"]
    server.stop()
    assert restored(coldrise, f"{address}/vda", tmp_path) == bytes(image.content)
    done = coldrise.json("fold")
    assert done["served_sessions"] == 0
    assert len(layers(coldrise)) == 1
    for old_address, content in [*sealed, (address, bytes(image.content))]:
        assert restored(coldrise, f"{old_address}/vda", tmp_path) == content


def test_what_cannot_be_folded_is_told(coldrise, sealed, point):
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
    """A larger disk, so that there is something to be killed in."""
    seed = int.from_bytes(os.urandom(4))
    print(f"seed {seed}")
    numbers = random.Random(seed)
    image = Image(64 * MIB)
    image.fill(0, 8 * MIB, "base")
    base = coldrise.backup("web02", vda=image.save(tmp_path / "large.raw"))
    live = coldrise.publish(base, "killed")["vda"]
    points = []
    for _ in range(12):
        server = nbdkit()
        write_some(server, live, image, numbers, count=60)
        server.stop()
        points.append((coldrise.json("seal", "killed")["address"], bytes(image.content)))
        process = coldrise.start("--quiet", "fold")
        time.sleep(numbers.random() * 0.4)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=60)
        address, content = numbers.choice(points)
        assert restored(coldrise, f"{address}/vda", tmp_path) == content
        assert restored(coldrise, live, tmp_path) == bytes(image.content)
    coldrise.json("fold")
    assert len(layers(coldrise)) == 1
    assert coldrise.json("verify")["is_clean"]
    for address, content in points:
        assert restored(coldrise, f"{address}/vda", tmp_path) == content

"""A layer file of a session is lost: no point that cannot be read is made, and every command names the file."""

import errno
import json
import shutil
import time

import nbd
import pytest

BLOCK = 4096


@pytest.fixture
def layers(coldrise, live, nbdkit):
    """The files of the sealed layer and of the layer that takes the writes; both hold writes."""
    folder = coldrise.repository / "layers"
    (sealed,) = folder.iterdir()
    with nbdkit() as server, server.connect(live) as handle:
        handle.pwrite(b"a" * BLOCK, BLOCK)
        handle.flush()
        coldrise.json("seal", "trial")
        handle.pwrite(b"b" * BLOCK, 2 * BLOCK)
    (top,) = [path for path in folder.iterdir() if path != sealed]
    return sealed, top


def lose(how, lost, other):
    match how:
        case "missing":
            lost.unlink()
        case "truncated":
            with open(lost, "r+b") as file:
                file.truncate(8 * BLOCK)
        case "of another disk":
            lost.write_bytes(other.read_bytes())


def addresses(coldrise):
    machines = coldrise.json("list")["machines"]
    return [point["address"] for machine in machines for point in machine["points"]]


@pytest.mark.parametrize("how", ["missing", "truncated", "of another disk"])
def test_no_point_is_sealed_over_a_lost_layer(coldrise, layers, how):
    sealed, top = layers
    content, before = sealed.read_bytes(), addresses(coldrise)
    lose(how, sealed, top)
    for command in (["seal", "trial"], ["unpublish", "trial"]):
        done = coldrise.run("--json", *command)
        assert done.returncode == 1, (command, done.stdout)
        assert json.loads(done.stdout.splitlines()[-1])["error"]["kind"] == "corrupt"
        for part in (str(sealed), "nothing was sealed", "coldrise unpublish trial --discard"):
            assert part in done.stderr, done.stderr
        assert addresses(coldrise) == before
        assert len(list((coldrise.repository / "layers").iterdir())) <= 2
    sealed.write_bytes(content)
    assert coldrise.json("verify")["is_clean"]
    assert coldrise.json("seal", "trial")["address"].endswith("+2")
    assert coldrise.json("verify")["is_clean"]


def test_a_session_without_writes_ends_without_a_lost_layer(coldrise, layers):
    coldrise.json("seal", "trial")
    before = addresses(coldrise)
    layers[0].unlink()
    coldrise.json("unpublish", "trial")
    assert addresses(coldrise) == before


def test_a_served_session_is_not_sealed_over_a_lost_layer(coldrise, live, layers, nbdkit):
    before = addresses(coldrise)
    with nbdkit() as server, server.connect(live):
        layers[0].unlink()
        done = coldrise.run("seal", "trial")
        assert done.returncode == 1 and str(layers[0]) in done.stderr, done.stdout + done.stderr
    assert addresses(coldrise) == before


def test_reads_of_a_lost_layer_are_io_errors_and_logged(live, layers, nbdkit):
    sealed, top = layers
    server = nbdkit()
    with server.connect(live) as handle:
        sealed.unlink()
        with pytest.raises(nbd.Error) as failed:
            handle.pread(BLOCK, BLOCK)
        assert failed.value.errnum == errno.EIO
        assert handle.pread(BLOCK, 2 * BLOCK) == b"b" * BLOCK
        handle.pwrite(b"c" * BLOCK, 3 * BLOCK)
    server.stop()
    assert str(sealed) in server.messages() and "coldrise verify" in server.messages()


@pytest.mark.parametrize("number", [0, 1])
def test_a_session_without_a_layer_is_damaged(coldrise, layers, number):
    layers[number].unlink()
    for command in (["seal", "trial"], ["diff", "live/trial/vda", "web01/latest/vda"]):
        done = coldrise.run("--json", *command)
        assert json.loads(done.stdout.splitlines()[-1])["error"]["kind"] == "corrupt", done.stdout
        assert str(layers[number]) in done.stderr, done.stderr


def test_an_idle_session_without_a_layer_is_read_at_once(coldrise, point, live):
    shutil.rmtree(coldrise.repository / "layers")

    def is_quick(command):
        begin = time.monotonic()
        done = coldrise.run(*command)
        assert done.returncode == 1 and "trial" in done.stdout + done.stderr, done.stdout
        return time.monotonic() - begin < 8

    for command in (["verify"], ["repair"], ["diff", live, f"{point}/vda"]):
        # A session that another process is opening is waited for, 10 s, each time. On a busy machine
        # a command takes as long only now and then.
        assert any(is_quick(command) for _ in range(3)), command


def test_repair_gives_advice_for_a_session(coldrise, layers):
    layers[1].unlink()
    done = coldrise.run("repair")
    assert done.returncode == 1 and "lost: live/trial/vda" in done.stdout, done.stdout
    assert "coldrise unpublish trial --discard" in done.stdout and "forget" not in done.stdout
    layers[0].unlink()
    done = coldrise.run("repair")
    assert "coldrise unpublish trial --discard" in done.stdout and "forget" in done.stdout
    assert "run coldrise verify" not in done.stdout
    coldrise.json("unpublish", "trial", "--discard")
    done = coldrise.run("repair")
    assert "unpublish" not in done.stdout and "forget" in done.stdout, done.stdout

"""NBD: the exports, their names and their announced properties."""

import socket
import struct
import subprocess

import nbd
import pytest

from support.cli import NBDKIT_PLUGIN
from support.nbdserver import NbdkitFailed, read_all, refused


def listed(server):
    """{name: description} as a client sees it."""
    handle = nbd.NBD()
    handle.set_opt_mode(True)
    handle.connect_unix(str(server.socket))
    names = {}
    handle.opt_list(lambda name, description: names.__setitem__(name, description))
    handle.opt_abort()
    return names


def test_every_point_and_session_is_listed(coldrise, point, image, tmp_path, nbdkit):
    server = nbdkit()
    assert list(listed(server)) == [f"{point}/vda"]

    # New exports are visible without a restart.
    live = coldrise.publish(point, "trial")["vda"]
    other = coldrise.backup("db01", sda=image.save(tmp_path / "sda.raw"))
    names = listed(server)
    assert list(names) == [live, f"{other}/sda", f"{point}/vda"]
    assert live == "live/trial/vda"
    assert "trial" in names[live] and point in names[live]
    assert "read-only" in names[f"{point}/vda"]


def test_no_name_means_the_only_export(coldrise, point, nbdkit):
    server = nbdkit()
    with server.connect("") as handle:
        assert handle.get_canonical_export_name() == f"{point}/vda"
        assert "web01" in handle.get_export_description()
    coldrise.publish(point, "trial")
    refused(server, "")


def test_latest_is_the_newest_point(coldrise, point, image, nbdkit):
    server = nbdkit()
    with server.connect("web01/latest/vda") as handle:
        assert read_all(handle) == image.content
    refused(server, "web01/latest~1/vda")

    # A synthetic point is newer than the one it came from.
    live = coldrise.publish(point, "trial")["vda"]
    with server.connect(live) as handle:
        handle.pwrite(b"new", 0)
    sealed = coldrise.json("seal", "trial")["address"]
    assert sealed == f"{point}+1"
    for name, start in [("latest", b"new"), ("latest~1", image.read(0, 3))]:
        with server.connect(f"web01/{name}/vda") as handle:
            assert bytes(handle.pread(3, 0)) == start


def test_a_session_announces_all_its_capabilities(live, image, nbdkit):
    with nbdkit().connect(live) as handle:
        assert handle.get_size() == len(image)
        assert not handle.is_read_only()
        assert handle.can_flush() and handle.can_fua()
        assert handle.can_trim() and handle.can_zero() and handle.can_fast_zero()
        assert handle.can_multi_conn() and handle.can_cache()
        assert handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)
        assert handle.get_block_size(nbd.SIZE_MINIMUM) == 1
        assert handle.get_block_size(nbd.SIZE_PREFERRED) == 4096
        assert handle.get_block_size(nbd.SIZE_MAXIMUM) == 32 << 20


def test_a_point_announces_that_it_is_read_only(point, image, nbdkit):
    with nbdkit().connect(f"{point}/vda") as handle:
        assert handle.get_size() == len(image)
        assert handle.is_read_only()
        assert handle.can_multi_conn() and handle.can_cache()
        assert handle.can_meta_context(nbd.CONTEXT_BASE_ALLOCATION)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "web01",
        "web01/latest",
        "web01/latest/vdb",
        "web01/latest~9/vda",
        "web01/19990101T000000Z/vda",
        "web02/latest/vda",
        "live/trial",
        "live/trial/vdb",
        "live/other/vda",
        "live/../web01/latest/vda",
        "web01/../web01/latest/vda",
        "../repository.json",
        "live/trial/../vda",
        "/web01/latest/vda",
        "web01/latest/vda/",
        "WEB01/latest/vda",
        "web01/latest/v\N{LATIN SMALL LETTER A WITH DIAERESIS}",
        "web01/latest/" + "a" * 64,
        "x" * 4000,
    ],
)
def test_unknown_exports_are_refused_with_the_reason(live, name, nbdkit):
    server = nbdkit()
    refused(server, name)
    if name:
        assert "error: export" in server.messages() or "longer" in server.messages()
    with server.connect(live) as handle:
        assert handle.get_size() > 0, "the server serves on"


def test_a_name_with_nul_is_refused(live, nbdkit):
    server = nbdkit()
    name = live.encode() + b"\0x"
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(30)
        client.connect(str(server.socket))
        greeting = client.recv(18, socket.MSG_WAITALL)
        assert greeting[:16] == b"NBDMAGICIHAVEOPT"
        option_go = 7
        payload = struct.pack(">I", len(name)) + name + struct.pack(">H", 0)
        client.sendall(
            struct.pack(">I", 1) + b"IHAVEOPT" + struct.pack(">II", option_go, len(payload))
        )
        client.sendall(payload)
        reply = client.recv(20, socket.MSG_WAITALL)
        (kind,) = struct.unpack(">I", reply[12:16])
        assert kind & 0x8000_0000, "an error is the only answer"
    with server.connect(live) as handle:
        assert handle.get_size() > 0


@pytest.mark.encrypted
def test_configuration_errors_are_reported_before_serving(coldrise, point, tmp_path, nbdkit):
    wrong = tmp_path / "wrong"
    wrong.write_text("not the passphrase\n", encoding="utf-8")
    repository = f"repo={coldrise.repository}"
    for parameters, message in [
        ([], "repo=DIR is missing"),
        (["repo=/nowhere"], "/nowhere"),
        ([f"repo={tmp_path}"], "not a Coldrise repository"),
        ([repository], "passphrase"),
        ([repository, f"passphrase-file={wrong}"], "passphrase"),
        ([repository, "passphrase-file=/nowhere"], "/nowhere"),
        ([repository, "colour=red"], "unknown parameter"),
        ([repository, "chunk-cache=lots"], "lots"),
        ([repository, "list-formats=some"], "some"),
        ([repository, repository], "given twice"),
    ]:
        unused = tmp_path / "unused"
        unused.unlink(missing_ok=True)
        done = subprocess.run(
            ["nbdkit", "-f", "-U", unused, NBDKIT_PLUGIN, *parameters],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode != 0, parameters
        assert message in done.stderr, (parameters, done.stderr)
    with pytest.raises(NbdkitFailed) as failed:
        nbdkit("passphrase-command=true")
    assert "exclude each other" in failed.value.messages

"""NBD: clients learn the reason of a refused export."""

import subprocess

import pytest

from support import hostile_nbd
from support.image import Image

POLICY, UNKNOWN = 0x8000_0002, 0x8000_0006


@pytest.fixture
def served(coldrise, tmp_path):
    """`coldrise serve nbd`: starts one and returns its socket."""
    processes = []

    def start():
        path = tmp_path / f"served{len(processes)}"
        process = coldrise.start("serve", "nbd", "--socket", path, stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL)
        processes.append(process)
        assert process.stdout.readline().startswith("ready")
        return path

    yield start
    for process in processes:
        process.terminate()
        process.communicate(timeout=30)


def asked(path, name):
    """The answer to a client that requests an export."""
    with hostile_nbd.connect(path) as stream:
        kind, text = hostile_nbd.go(stream, name)
        if kind != 1:
            # The connection stays open: the client may ask for another name.
            assert hostile_nbd.go(stream, name)[0] == kind
        return kind, text.decode()


def test_an_unknown_export_is_named(live, served):
    kind, text = asked(served(), "live/other/vda")
    assert kind == UNKNOWN and '"live/other/vda"' in text and "other" in text
    kind, text = asked(served(), "no name")
    assert kind == UNKNOWN and '"no name"' in text


def test_a_session_in_use_is_reported_as_busy(live, served):
    first, second = served(), served()
    with hostile_nbd.connect(first) as writer:
        assert hostile_nbd.go(writer, live)[0] == 1
        kind, text = asked(second, live)
        assert kind == POLICY and "written by another process" in text
        shown = subprocess.run(
            ["qemu-img", "info", f"nbd+unix:///{live}?socket={second}"],
            capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
        assert shown.returncode != 0 and "written by another process" in shown.stderr
        # A refusal affects no other client.
        assert asked(second, "live/other/vda")[0] == UNKNOWN


def test_a_damaged_session_is_reported_as_damaged(coldrise, live, served):
    (layer,) = (coldrise.repository / "layers").iterdir()
    layer.write_bytes(b"damaged" * 1000)
    kind, text = asked(served(), live)
    assert kind == POLICY and str(layer) in text


def test_a_disk_that_qemu_would_misread_is_not_served_as_fixed_vhd(coldrise, served, tmp_path):
    """QEMU looks for a dynamic VHD's header where a fixed one has the disk's first bytes."""
    disk = Image(1 << 20)
    disk.write(0, b"conectix")
    point = coldrise.backup("nested", vda=disk.save(tmp_path / "vda.raw"))
    live = coldrise.publish(point, "trial")["vda"]
    path = served()
    for name in (f"{point}/vda", live):
        kind, text = asked(path, f"{name}.vhd")
        assert kind == POLICY and "conectix" in text and "dynamic" in text
        assert asked(path, f"{name}.vhdx")[0] == 1
    assert asked(path, f"{point}/vda.dynamic.vhd")[0] == 1
    target = tmp_path / "out.vhd"
    refused = coldrise.run("restore", f"{point}/vda", target, "--format", "vhd-fixed")
    assert refused.returncode == 1 and "conectix" in refused.stderr and not target.exists()
    coldrise.json("restore", f"{point}/vda", target, "--format", "vhd")
    compared = subprocess.run(["qemu-img", "compare", "-f", "vpc", "-F", "raw", target, tmp_path / "vda.raw"],
                              capture_output=True, text=True, timeout=60, check=False)
    assert compared.returncode == 0, compared.stdout + compared.stderr

"""NBD: who may not open an export is told why."""

import subprocess

import pytest

from support import hostile_nbd

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
    """What a client that asks for an export is answered."""
    with hostile_nbd.connect(path) as stream:
        kind, text = hostile_nbd.go(stream, name)
        # The connection goes on: another name may be asked for.
        assert hostile_nbd.go(stream, name)[0] == kind
        return kind, text.decode()


def test_an_unknown_export_is_named(live, served):
    kind, text = asked(served(), "live/other/vda")
    assert kind == UNKNOWN and '"live/other/vda"' in text and "other" in text
    kind, text = asked(served(), "no name")
    assert kind == UNKNOWN and '"no name"' in text


def test_a_session_in_use_is_no_unknown_export(live, served):
    first, second = served(), served()
    with hostile_nbd.connect(first) as writer:
        assert hostile_nbd.go(writer, live)[0] == 1
        kind, text = asked(second, live)
        assert kind == POLICY and "written by another process" in text
        shown = subprocess.run(
            ["qemu-img", "info", f"nbd+unix:///{live}?socket={second}"],
            capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
        assert shown.returncode != 0 and "written by another process" in shown.stderr
        # A refusal concerns nobody else.
        assert asked(second, "live/other/vda")[0] == UNKNOWN


def test_a_damaged_session_is_no_unknown_export(coldrise, live, served):
    (layer,) = (coldrise.repository / "layers").iterdir()
    layer.write_bytes(b"damaged" * 1000)
    kind, text = asked(served(), live)
    assert kind == POLICY and str(layer) in text

"""coldrise serve nfs: a client that does what ESXi does, written with libnfs.

ESXi's use of NFSv4.1 (opens that deny access to others) is in test_nfs_shares.py.
"""

import subprocess

import pytest

from support.cli import ROOT

# As in the client.
FLAT_WRITES, FLAT_BLOCK, FLAT_OFFSET = 64, 4096, 1 << 20


@pytest.fixture
def esxi(tmp_path):
    """The client's program."""
    program = tmp_path / "esxi"
    strict = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Wshadow", "-Wstrict-prototypes", "-Werror"]
    command = ["cc", *strict, "-o", program, ROOT / "tests/esxi/client.c", "-lnfs"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert built.returncode == 0, built.stderr
    return program


def test_a_hypervisor_locks_configures_and_writes(coldrise, live, image, nfs, esxi, tmp_path):
    server = nfs("--versions", "3")
    done = server.network.run(esxi, "127.0.0.1", "/coldrise", "trial")
    assert done.returncode == 0, done.stderr
    with server.connect() as client:
        session = client.walk(server.root(), "live/trial")
        names = [name for name in client.names(session) if not name.startswith("vda")]
        assert names == ["trial.vmx", "vm.vmx"]
    for number in range(FLAT_WRITES):
        image.write(FLAT_OFFSET + number * FLAT_BLOCK, bytes([number]) * FLAT_BLOCK)
    # All of it was stable.
    server.crash()
    sealed = coldrise.json("seal", "trial")["address"]
    with server.connect() as client:
        assert client.read_all(client.walk(server.root(), f"{sealed}/vda.raw")) == image.content
        text = client.read_all(client.walk(server.root(), f"{sealed}/vm.vmx"))
        assert text == b'memsize = "128"\nnumvcpus = "2"\n'

"""coldrise serve nfs: starting, ending, and who may connect."""

import os
import signal
import subprocess

import pytest

from support import nfs3
from support.cli import PROGRAM
from support.nbdserver import wait_until
from support.network import OTHER_ADDRESS
from support.foreground import ServerFailed, children


def refused(nfs, *options):
    """How a server that does not start ends: exit code and messages."""
    with pytest.raises(ServerFailed) as failed:
        nfs(*options)
    return failed.value.code, failed.value.messages


def verifier(server):
    with server.connect() as client:
        return client.commit(client.walk(server.root(), "live/trial/vda.raw"))


def test_every_start_has_another_write_verifier(coldrise, live, nfs):
    found = []
    # As fast as they start, so several fall into the same second.
    for _ in range(4):
        server = nfs()
        found.append(verifier(server))
        server.stop()
    assert len(set(found)) == 4
    # A clock that was set back does not matter: the last number is kept.
    last = int((coldrise.repository / "nfs-epoch").read_text())
    (coldrise.repository / "nfs-epoch").write_text(f"{last + 1_000_000}\n")
    found.append(verifier(nfs()))
    assert len(set(found)) == 5
    assert int((coldrise.repository / "nfs-epoch").read_text()) == last + 1_000_001


def test_a_client_that_mounts_immediately_finds_all_rpc_programs(live, nfs, tmp_path, monkeypatch):
    """nfs-ganesha registers one after the other. An rpcbind that takes its time shows the moments in between."""
    slow = tmp_path / "bin" / "rpcbind"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec strace -D -f -qq -o /dev/null -e trace=poll,ppoll -e inject=poll,ppoll:delay_exit=10ms"
                    " /usr/sbin/rpcbind \"$@\"\n", encoding="utf-8")
    slow.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{slow.parent}:{os.environ['PATH']}")
        for _ in range(5):
            server = nfs()
            listed = server.network.run("rpcinfo", "-p").stdout.decode()
            assert "nfs" in listed and "mountd" in listed, listed
            server.stop()


def test_serve_prints_the_mount_command(live, nfs):
    mount = nfs().ready["mount"]
    assert mount == {
        "ESXi": "esxcli storage nfs add -H 127.0.0.1 -s /coldrise -v coldrise",
        "Linux": "mount -t nfs -o vers=4.1,port=2049 127.0.0.1:/coldrise /mnt",
        "QEMU": "nfs://127.0.0.1/coldrise/live/SESSION/DISK.raw",
    }


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_server_exits_and_leaves_nothing(live, nfs, network, nbdkit, number):
    server = nfs()
    with server.connect() as client:
        disk = client.walk(server.root(), "live/trial/vda.raw")
        client.write(disk, 0, b"unstable" * 512)
        processes = children(server.process.pid)
        assert len(processes) == 2, "nfs-ganesha and rpcbind"
        # Once: a second signal kills nfs-ganesha.
        server.stop(number)
    assert not any(os.path.exists(f"/proc/{process}") for process in processes)
    # The writes were flushed, and the session was released.
    with nbdkit().connect(live) as nbd:
        assert nbd.pread(4096, 0) == b"unstable" * 512


def test_nfs_ganesha_and_rpcbind_end_with_their_parent(live, nfs):
    server = nfs()
    started = children(server.process.pid)
    rpcbind = [child for process in started for child in children(process)]
    assert len(rpcbind) == 1
    server.kill()
    wait_until(lambda: not any(map(is_running, started + rpcbind)), "their end")


def is_running(process):
    try:
        with open(f"/proc/{process}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_another_server_in_its_place_is_left_alone(live, nfs):
    first = nfs()
    code, messages = refused(nfs)
    assert code == 11 and "127.0.0.1:2049" in messages
    code, messages = refused(nfs, "--listen", "127.0.0.1:3049", "--mount-port", "30048")
    assert code == 11 and "--versions 4" in messages, "rpcbind knows one server of NFSv3"
    assert nfs("--listen", "127.0.0.1:3049", "--versions", "4").process.poll() is None
    assert first.root()


def test_other_ports_are_served(live, nfs, network):
    server = nfs("--listen", "127.0.0.1:3049", "--mount-port", "30048", "--versions", "3")
    root = nfs3.mount(network, "/coldrise", port=30048)
    with nfs3.Nfs(network, port=3049) as client:
        assert client.names(root) == ["live", "web01"]
    assert "ESXi" not in server.ready["mount"], "it takes the standard port only"


def test_the_network_is_served_to_allowed_clients(live, nfs, network):
    code, messages = refused(nfs, "--listen", "0.0.0.0:2049")
    assert code == 2 and "--allow" in messages
    nfs("--listen", "0.0.0.0:2049", "--allow", "127.0.0.1")
    root = nfs3.mount(network, "/coldrise")
    with pytest.raises(nfs3.Refused) as failed:
        nfs3.mount(network, "/coldrise", OTHER_ADDRESS)
    assert failed.value.status == nfs3.ACCES
    with nfs3.Nfs(network, OTHER_ADDRESS) as client:
        # A handle alone gives no access.
        with pytest.raises(nfs3.Denied):
            client.getattr(root)
    with nfs3.Nfs(network) as client:
        assert client.getattr(root)["type"] == nfs3.FOLDER


def test_networks_are_allowed(live, nfs, network):
    nfs("--listen", "0.0.0.0:2049", "--allow", "192.0.2.0/24", "--allow", "10.0.0.0/8")
    assert nfs3.mount(network, "/coldrise", OTHER_ADDRESS)
    with pytest.raises(nfs3.Refused):
        nfs3.mount(network, "/coldrise")


def test_a_network_with_only_loopback_is_refused(coldrise, live):
    command = ["unshare", "--net", "--mount", "sh", "-c", 'ip link set lo up && exec "$@"', "sh",
               PROGRAM, "serve", "nfs", "--versions", "4"]
    done = subprocess.run(command, env=coldrise.environment(), capture_output=True, text=True,
                          timeout=60, check=False)
    assert done.returncode == 1 and "ip address add 192.0.2.1/32 dev lo" in done.stderr, done.stderr


@pytest.mark.encrypted
def test_a_wrong_option_state_or_passphrase_is_refused(coldrise, live, nfs, tmp_path):
    code, messages = refused(nfs, "--allow", "everybody")
    assert code == 2 and "everybody" in messages
    code, messages = refused(nfs, "--mount-port", "2049")
    assert code == 2
    (coldrise.repository / "nfs-epoch").write_text("nonsense\n")
    code, messages = refused(nfs)
    assert code == 1 and "nfs-epoch" in messages
    coldrise.passphrase_file.write_text("wrong\n")
    code, messages = refused(nfs)
    assert code == 12

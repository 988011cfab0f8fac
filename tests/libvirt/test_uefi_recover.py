"""Machines that start by UEFI from backups without their firmware's variables: recover."""

import os
import pathlib

import pytest

from support.nbdserver import wait_until
from support.uefi import EMPTY, NVRAM, STAYS, domain, store
from support.virsh import killed_at


@pytest.fixture
def end():
    """The last action of the machine's loader."""
    return STAYS


@pytest.fixture
def address(coldrise, tmp_path, end):
    return store(coldrise, tmp_path, end=end)


def users(libvirt, path):
    """The domains whose QEMU has a file of libvirt's namespace open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        process = pathlib.Path("/proc", pid)
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            opened = {os.readlink(link) for link in (process / "fd").iterdir()}
        except OSError:
            continue
        if b"qemu-system" in words[0] and path in opened:
            found |= {word.decode() for word in words if word.startswith(b"guest=")}
    return found


def test_a_recovered_machine_never_opens_the_variables_of_the_original(coldrise, libvirt, recover, address, clock,
                                                                       entered_tmp, tmp_path):
    folder = libvirt.folder / "lib/qemu/nvram"
    source = libvirt.images / "original.raw"
    source.write_bytes((tmp_path / "acme.raw").read_bytes())
    original = folder / "acme_VARS.fd"
    original.write_bytes(EMPTY.read_bytes())
    text = domain(source).replace("<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>", "")
    (tmp_path / "original.xml").write_text(text, encoding="utf-8")
    libvirt.virsh("define", tmp_path / "original.xml")
    libvirt.virsh("start", "acme")

    def own_files():
        return [path for path in folder.iterdir() if path != original]

    # Beside the original, then in place of the one that is off.
    for name, options in {"beside": ["--new-uuid", "--name", "beside"], "acme": ["--name", "acme"]}.items():
        if name == "acme":
            libvirt.virsh("destroy", "acme")
            before = original.stat()
        running = recover(address, *options, clock=clock)
        assert r"starts \EFI\acme\grubx64.efi of vda" in running.said()
        assert "TPM is not in the backup: its keys cannot unlock BitLocker or LUKS disks" in running.said()
        [own] = own_files()
        assert users(libvirt, f"{NVRAM}/{own.name}") == {f"guest={name},debug-threads=on"}
        assert users(libvirt, f"{NVRAM}/acme_VARS.fd") == ({"guest=acme,debug-threads=on"} if name == "beside" else set())
        # The firmware of the recovered machine writes: into its own file.
        wait_until(lambda: own.read_bytes() != EMPTY.read_bytes(), "its firmware's first write")
        if name == "acme":
            assert original.stat() == before, "the original's file was written"
        coldrise.json("recover", f"live/{name}", "--undo", "--discard")
        running.end()
        assert own_files() == [] and original.exists()
        assert not list(entered_tmp.glob("*.vars"))
    original.unlink()


@pytest.mark.parametrize("end", ["halt"])
def test_recover_starts_a_loader_without_a_boot_variable(coldrise, libvirt, recover, address, tmp_path):
    """The loader turns the machine off. A killed unpublish is done again: it removes the variables, and nothing else stays."""
    running = recover(address, "--name", "off")
    # Its firmware takes seconds, on a busy machine many.
    libvirt.virsh("event", "off", "--event", "lifecycle")
    wait_until(lambda: libvirt.domains() == [], "the end of the machine")
    running.kill()
    [own] = (libvirt.folder / "lib/qemu/nvram").iterdir()
    assert own.name.startswith("off-")
    wait_until(lambda: not coldrise.json("sessions")["sessions"][0]["is_served"], "the server of the disk ends")
    for request in ("define /dev/stdin", "undefine"):
        with killed_at(tmp_path, "after", request):
            assert coldrise.run("unpublish", "off").returncode == -9
    coldrise.json("unpublish", "off")
    assert not own.exists() and libvirt.virsh("list", "--all", "--name") == ""

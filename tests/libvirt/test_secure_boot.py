"""A machine with Secure Boot: q35, system management mode, and keys in its firmware's variables."""

import subprocess

import pytest

from support.libvirt import QEMU_USER
from support.uefi import CODE, EMPTY, disk_of, domain

# Keys whose private half everybody has, and variables in which they are enrolled.
KEY, CERTIFICATE = (f"/usr/share/ovmf/PkKek-1-snakeoil.{kind}" for kind in ("key", "pem"))
ENROLLED = EMPTY.with_name("OVMF_VARS_4M.snakeoil.fd")
# GRUB is locked if Secure Boot is on.
SAYS = "serial --unit=0 --speed=115200\nterminal_output serial\necho \"locked-$lockdown login: \"\nsleep 3600\n"


@pytest.fixture
def address():
    """Tests name their points."""
    return None


def loader(folder):
    """A signed boot loader that tells whether Secure Boot is on."""
    script, program, key = folder / "grub.cfg", folder / "loader.efi", folder / "key"
    script.write_text(SAYS, encoding="utf-8")
    subprocess.run(["grub-mkimage", "-O", "x86_64-efi", "--disable-shim-lock", "-p", "/", "-c", script, "-o", program, "serial", "terminal",
                    "echo", "sleep"], check=True)
    subprocess.run(["openssl", "pkey", "-in", KEY, "-passin", "pass:snakeoil", "-out", key], check=True)
    subprocess.run(["sbsign", "--key", key, "--cert", CERTIFICATE, "--output", program, program], check=True, capture_output=True)
    return program


def test_secure_boot_comes_with_the_variables(coldrise, libvirt, recover, tmp_path):
    scratch, source = libvirt.images / "scratch", libvirt.images / "acme.raw"
    scratch.mkdir()
    source.write_bytes(disk_of(tmp_path, {"/EFI/BOOT/BOOTX64.EFI": loader(tmp_path)}).read_bytes())
    secure = domain(source).replace(f"type='pflash'>{CODE}", f"secure='yes' type='pflash'>{CODE.replace('.fd', '.secboot.fd')}")
    secure = secure.replace(str(EMPTY), str(ENROLLED)).replace("<acpi/>", "<acpi/><smm state='on'/>")
    (tmp_path / "acme.xml").write_text(secure.replace("<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>", ""), encoding="utf-8")
    libvirt.virsh("define", tmp_path / "acme.xml")
    # It needs no start: libvirt has made its variables.
    libvirt.virsh("start", "acme", "--paused")
    coldrise.wrap = lambda *command: [*libvirt.inside(), *command]
    made = coldrise.run("backup", "acme", "--from", "libvirt", "--connect", libvirt.uri, "--scratch", scratch)
    assert made.returncode == 0 and "not in this point" not in made.stderr, made.stderr
    libvirt.virsh("destroy", "acme")
    libvirt.virsh("undefine", "acme", "--nvram")
    checked = coldrise.json("check-boot", "acme/latest")
    assert checked["verdict"] == "ok" and "locked-y login" in checked["rungs"][-1]["evidence"], checked
    running = recover("acme/latest")
    started = libvirt.virsh("dumpxml", "acme")
    for word in ("secure='yes'", "OVMF_CODE_4M.secboot.fd", "<smm state='on'/>", "machine='pc-q35"):
        assert word in started, started
    [own] = (libvirt.folder / "lib/qemu/nvram").iterdir()
    assert own.stat().st_uid == QEMU_USER and own.read_bytes()[:4096] == ENROLLED.read_bytes()[:4096]
    coldrise.json("recover", "live/acme-1", "--undo", "--discard")
    assert running.end()["state"] == "off"

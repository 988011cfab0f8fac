"""Machines that start by UEFI from backups without their firmware's variables: boot, check-boot, recover."""

import os
import pathlib
import subprocess

import pytest

from support.counting_machine import MIB, UUID
from support.virsh import killed_at
from support.libvirt import QEMU_USER, Libvirt
from support.nbdserver import wait_until

CODE = "/usr/share/OVMF/OVMF_CODE_4M.fd"
EMPTY = pathlib.Path("/usr/share/OVMF/OVMF_VARS_4M.fd")
NVRAM = "/var/lib/libvirt/qemu/nvram"


def loader(folder, end):
    """A boot loader that writes a login prompt to the serial port, then ends as told."""
    script = folder / "grub.cfg"
    script.write_text(f"serial --unit=0 --speed=115200\nterminal_output serial\necho 'acme login: '\n{end}\n", encoding="utf-8")
    program = folder / "loader.efi"
    subprocess.run(["grub-mkimage", "-O", "x86_64-efi", "-p", "/", "-c", script, "-o", program,
                    "serial", "terminal", "echo", "halt", "sleep"], check=True)
    return program


def disk(folder, path, end):
    """A disk whose EFI system partition has a loader at this path only."""
    system, whole = folder / "esp", folder / "acme.raw"
    with open(system, "wb") as file:
        file.truncate(8 * MIB)
    subprocess.run(["mkfs.vfat", system], check=True, stdout=subprocess.DEVNULL)
    for parent in reversed(list(pathlib.PurePosixPath(path).parents)[:-1]):
        subprocess.run(["mmd", "-i", system, f"::{parent}"], check=True)
    subprocess.run(["mcopy", "-i", system, loader(folder, end), f"::{path}"], check=True)
    with open(whole, "wb") as file:
        file.truncate(10 * MIB)
    subprocess.run(["sfdisk", "-q", whole], input=b"label: gpt\nstart=2048,size=16384,type=uefi\n", check=True)
    with open(whole, "r+b") as file:
        file.seek(MIB)
        file.write(system.read_bytes())
    return whole


def domain(source, nvram="/var/lib/libvirt/qemu/nvram/acme_VARS.fd"):
    return f"""<domain type='qemu'><name>acme</name><uuid>{UUID}7</uuid><memory unit='MiB'>256</memory><vcpu>1</vcpu>
<os><type arch='x86_64' machine='q35'>hvm</type><loader readonly='yes' type='pflash'>{CODE}</loader>
<nvram template='{EMPTY}'>{nvram}</nvram></os><features><acpi/></features><on_poweroff>destroy</on_poweroff>
<devices><disk type='file' device='disk'><driver name='qemu' type='raw'/><source file='{source}'/>
<target dev='vda' bus='virtio'/></disk><serial type='pty'/>
<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm></devices></domain>"""


@pytest.fixture
def acme(coldrise, tmp_path):
    """Stores the machine; returns the address of its point."""
    def store(path="/EFI/acme/grubx64.efi", end="halt"):
        configuration = tmp_path / "acme.xml"
        configuration.write_text(domain("/lost.raw"), encoding="utf-8")
        made = coldrise.json("backup", "acme", f"vda=raw:{disk(tmp_path, path, end)}", "--config", configuration)
        return made["address"]
    return store


def test_boot_starts_a_loader_that_no_variable_names(coldrise, acme):
    """The loader turns the machine off; the firmware's shell would wait for ever."""
    first = coldrise.run("boot", acme(), "--name", "one")
    assert first.returncode == 0 and "acme login" in first.stdout, first.stderr
    assert r"the machine starts \EFI\acme\grubx64.efi of vda" in first.stderr
    assert "TPM is in no backup" in first.stderr
    # It keeps the variables that the firmware had then.
    second = coldrise.run("boot", "live/one")
    assert second.returncode == 0 and "acme login" in second.stdout, second.stderr
    assert "firmware variables" not in second.stderr


def test_an_interrupted_boot_keeps_the_variables(coldrise, acme, tmp_path):
    with open(tmp_path / "said", "w", encoding="utf-8") as said:
        booting = coldrise.start("boot", acme(end="sleep 3600"), "--name", "one", stdout=said, stderr=said)
        wait_until(lambda: "acme login" in (tmp_path / "said").read_text(errors="replace"), "the loader")
        booting.terminate()
        assert booting.wait(timeout=60) != 0
    booting = coldrise.start("boot", "live/one", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = ""
    while "acme login" not in said:
        line = booting.stdout.readline()
        assert line, said
        said += line
    booting.terminate()
    booting.communicate(timeout=60)
    assert "firmware variables" not in said


def test_check_boot_starts_a_loader_that_no_variable_names(coldrise, acme):
    checked = coldrise.json("check-boot", acme(end="sleep 3600"))
    assert checked["verdict"] == "ok" and checked["rungs"][-1]["rung"] == "login", checked


def test_a_fallback_loader_needs_no_entry_and_a_missing_one_is_said(coldrise, acme, tmp_path):
    booted = coldrise.run("boot", acme("/EFI/BOOT/BOOTX64.EFI"))
    assert booted.returncode == 0 and "acme login" in booted.stdout, booted.stderr
    assert "variables" not in booted.stderr
    empty = tmp_path / "empty.raw"
    empty.write_bytes(bytes(MIB))
    coldrise.json("backup", "empty", f"vda=raw:{empty}", "--config", tmp_path / "acme.xml")
    checked = coldrise.run("check-boot", "empty/latest", "--time-limit", "1s")
    assert "no EFI system partition has a boot loader" in checked.stderr, checked.stderr


@pytest.fixture
def libvirt():
    libvirt = Libvirt()
    yield libvirt
    libvirt.close()


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


def test_a_recovered_machine_never_opens_the_variables_of_the_original(coldrise, libvirt, acme, own_tmp, tmp_path):
    own_tmp.chmod(0o755)
    address = acme(end="sleep 3600")
    folder = libvirt.folder / "lib/qemu/nvram"
    source = libvirt.folder / "original.raw"
    source.write_bytes((tmp_path / "acme.raw").read_bytes())
    original = folder / "acme_VARS.fd"
    original.write_bytes(EMPTY.read_bytes())
    text = domain(source).replace("<tpm model='tpm-crb'><backend type='emulator' version='2.0'/></tpm>", "")
    (tmp_path / "original.xml").write_text(text, encoding="utf-8")
    libvirt.virsh("define", tmp_path / "original.xml")
    libvirt.virsh("start", "acme")
    before = original.stat()

    def recover(*options):
        said = open(own_tmp / "said", "w+", encoding="utf-8")
        process = coldrise.start("recover", address, "--to", "libvirt", "--connect", libvirt.uri, "--json", "--socket",
                                 own_tmp / "nbd", "--socket-owner", QEMU_USER, *options, stdout=subprocess.PIPE, stderr=said)
        line = process.stdout.readline()
        said.seek(0)
        told = said.read()
        assert line, told
        return process, told

    def own_files():
        return [path for path in folder.iterdir() if path != original]

    # Beside the original, then in place of the one that is off.
    for name, options in {"beside": ["--new-uuid", "--name", "beside"], "acme": ["--name", "acme"]}.items():
        if name == "acme":
            libvirt.virsh("destroy", "acme")
            before = original.stat()
        process, told = recover(*options)
        assert r"starts \EFI\acme\grubx64.efi of vda" in told
        assert "TPM is in no backup: keys that it holds do not open BitLocker or LUKS disks" in told
        [own] = own_files()
        assert users(libvirt, f"{NVRAM}/{own.name}") == {f"guest={name},debug-threads=on"}
        assert users(libvirt, f"{NVRAM}/acme_VARS.fd") == ({"guest=acme,debug-threads=on"} if name == "beside" else set())
        # The firmware of the recovered machine writes: into its own file.
        wait_until(lambda: own.read_bytes() != EMPTY.read_bytes(), "its firmware's first write")
        if name == "acme":
            assert original.stat() == before, "the original's file was written"
        coldrise.json("recover", f"live/{name}", "--undo", "--discard")
        assert process.wait(timeout=60) == 0
        assert own_files() == [] and original.exists()
        assert not list(own_tmp.glob("*.vars"))


@pytest.mark.parametrize(("moment", "request_word"), [("after", "define /dev/stdin"), ("after", "undefine")])
def test_recover_starts_a_loader_that_no_variable_names(coldrise, libvirt, acme, own_tmp, tmp_path, moment, request_word):
    """The loader turns the machine off. A killed unpublish is done again: it removes the variables, and nothing else stays."""
    own_tmp.chmod(0o755)
    process = coldrise.start("recover", acme(), "--to", "libvirt", "--connect", libvirt.uri, "--json", "--socket",
                             own_tmp / "nbd", "--socket-owner", QEMU_USER, "--name", "off", stdout=subprocess.PIPE)
    assert process.stdout.readline()
    assert process.wait(timeout=120) == 0 and libvirt.domains() == []
    [own] = (libvirt.folder / "lib/qemu/nvram").iterdir()
    assert own.name.startswith("off-")
    with killed_at(tmp_path, moment, request_word):
        assert coldrise.run("unpublish", "off").returncode == -9
    coldrise.json("unpublish", "off")
    assert not own.exists() and libvirt.virsh("list", "--all", "--name") == ""

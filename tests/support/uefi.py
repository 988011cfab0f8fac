"""A machine that starts by UEFI, without a system."""

import pathlib
import subprocess

from support.counting_machine import MIB, UUID

CODE = "/usr/share/OVMF/OVMF_CODE_4M.fd"
EMPTY = pathlib.Path("/usr/share/OVMF/OVMF_VARS_4M.fd")
STAYS = "stays"
NVRAM = "/var/lib/libvirt/qemu/nvram"


def loader(folder, end, word="acme"):
    """A boot loader that writes a login prompt to the serial port, then ends as requested: by a command of GRUB, or not (STAYS)."""
    if end == STAYS:
        return repeating(folder, word)
    script = folder / "grub.cfg"
    script.write_text(f"serial --unit=0 --speed=115200\nterminal_output serial\necho '{word} login: '\n{end}\n", encoding="utf-8")
    program = folder / "loader.efi"
    subprocess.run(["grub-mkimage", "-O", "x86_64-efi", "-p", "/", "-c", script, "-o", program,
                    "serial", "terminal", "echo", "halt"], check=True)
    return program


# Interrupts 100 times a second wake the processor: it needs 2 % of an emulated one, GRUB's sleep all of it.
REPEATING = """
.globl start
start:  cld
again:  lea text(%rip), %rsi
next:   lodsb
        test %al, %al
        jz wait
        mov $0x3f8, %dx
        out %al, %dx
        jmp next
wait:   mov $100, %ecx
tick:   hlt
        loop tick
        jmp again
"""


def repeating(folder, word):
    """A boot loader that writes a login prompt to the serial port each second, until the machine is ended."""
    source, elf, coff, program = (folder / name for name in ("loader.S", "loader.o", "loader.obj", "loader.efi"))
    source.write_text(f'{REPEATING}text:   .asciz "{word} login: \\r\\n"\n', encoding="utf-8")
    subprocess.run(["gcc", "-c", source, "-o", elf], check=True)
    subprocess.run(["objcopy", "-O", "pe-x86-64", elf, coff], check=True)
    subprocess.run(["ld", "-m", "i386pep", "--subsystem", "10", "-e", "start", "-o", program, coff], check=True)
    return program


def disk(folder, path, end):
    """A disk whose EFI system partition has a loader at this path only."""
    return disk_of(folder, {path: loader(folder, end)})


def disk_of(folder, programs):
    """A disk whose EFI system partition has these programs by their paths there."""
    system, whole = folder / "esp", folder / "acme.raw"
    with open(system, "wb") as file:
        file.truncate(8 * MIB)
    subprocess.run(["mkfs.vfat", system], check=True, stdout=subprocess.DEVNULL)
    parents = {parent for path in programs for parent in list(pathlib.PurePosixPath(path).parents)[:-1]}
    for parent in sorted(parents):
        subprocess.run(["mmd", "-i", system, f"::{parent}"], check=True)
    for path, program in programs.items():
        subprocess.run(["mcopy", "-i", system, program, f"::{path}"], check=True)
    with open(whole, "wb") as file:
        file.truncate(10 * MIB)
    subprocess.run(["sfdisk", "-q", whole], input=b"label: gpt\nstart=2048,size=16384,type=uefi,uuid=0F3A6A4E-5C1D-4B7E-9E55-000000000001\n", check=True)
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


def store(coldrise, folder, path="/EFI/acme/grubx64.efi", end="halt"):
    """Its backup, without the firmware's variables; returns the address."""
    configuration = folder / "acme.xml"
    configuration.write_text(domain("/lost.raw"), encoding="utf-8")
    made = coldrise.json("backup", "acme", f"vda=raw:{disk(folder, path, end)}", "--config", configuration)
    return made["address"]

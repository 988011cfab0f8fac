"""Machines that start by UEFI from backups without their firmware's variables: boot and check-boot."""

import functools
import subprocess
import threading

import pytest

from support.counting_machine import MIB
from support.uefi import STAYS, store


@pytest.fixture
def acme(coldrise, tmp_path):
    """Stores the machine; returns the address of its point."""
    return functools.partial(store, coldrise, tmp_path)


def test_boot_starts_a_loader_without_a_boot_variable(coldrise, acme):
    """The loader turns the machine off; the firmware's shell would never end."""
    first = coldrise.run("boot", acme(), "--name", "one")
    assert first.returncode == 0 and "acme login" in first.stdout, first.stderr
    assert r"the machine starts \EFI\acme\grubx64.efi of vda" in first.stderr
    assert "TPM is not in the backup" in first.stderr
    # It keeps the variables that the firmware had then.
    second = coldrise.run("boot", "live/one")
    assert second.returncode == 0 and "acme login" in second.stdout, second.stderr
    assert "firmware variables" not in second.stderr


def interrupted(coldrise, address, *options):
    """The output of a boot until its loader's prompt; then it is ended."""
    booting = coldrise.start("boot", address, *options, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    # The firmware's shell would never end.
    overdue = threading.Timer(120, booting.kill)
    overdue.start()
    said = ""
    while "acme login" not in said:
        line = booting.stdout.readline()
        assert line, said
        said += line
    overdue.cancel()
    booting.terminate()
    booting.communicate(timeout=60)
    assert booting.returncode != 0
    return said


def test_an_interrupted_boot_keeps_the_variables(coldrise, acme):
    assert "the machine starts" in interrupted(coldrise, acme(end=STAYS), "--name", "one")
    assert "firmware variables" not in interrupted(coldrise, "live/one")


def test_check_boot_starts_a_loader_without_a_boot_variable(coldrise, acme):
    checked = coldrise.json("check-boot", acme(end=STAYS))
    assert checked["verdict"] == "ok" and checked["rungs"][-1]["rung"] == "login", checked


def test_a_fallback_loader_works_without_an_entry_and_a_missing_one_is_reported(coldrise, acme, tmp_path):
    booted = coldrise.run("boot", acme("/EFI/BOOT/BOOTX64.EFI"))
    assert booted.returncode == 0 and "acme login" in booted.stdout, booted.stderr
    assert "variables" not in booted.stderr
    empty = tmp_path / "empty.raw"
    empty.write_bytes(bytes(MIB))
    coldrise.json("backup", "empty", f"vda=raw:{empty}", "--config", tmp_path / "acme.xml")
    checked = coldrise.run("check-boot", "empty/latest", "--time-limit", "1s")
    assert "no EFI system partition has a boot loader" in checked.stderr, checked.stderr

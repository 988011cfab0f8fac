"""A small site with a past: machines, weeks of points, some boot checks, jobs. For tests of the page."""

import contextlib
import datetime
import pathlib

from .cli import Coldrise

MIB = 1 << 20
UTC = datetime.UTC
# Prints a login prompt on the serial port and halts: a boot check takes a second.
LOGIN = bytes.fromhex("fc31c08ed8be167cbaf803ac84c07403eeebf8f4ebfd")
CONFIGURATION = """<domain type="kvm"><name>{machine}</name><memory unit="MiB">64</memory><vcpu>1</vcpu>
  <devices><disk type="file" device="disk"><target dev="vda" bus="virtio"/></disk></devices></domain>
"""


def boot_record(prompt):
    """A disk's first sector: it says `prompt` on the serial port."""
    code = LOGIN + f"{prompt}\0".encode()
    return code.ljust(510, b"\0") + b"\x55\xaa"


class Site:
    """A repository in `folder`. Times are relative to now, so that ages stay true."""

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.coldrise = Coldrise(self.folder / "repository")
        self.coldrise.init("--no-encryption")
        self.now = datetime.datetime.now(UTC).replace(microsecond=0)

    def back_up(self, machine, ages_hours, boots=True, seed=0, prompt=None, configuration_text=None):
        """Backs the machine up once per age, the oldest first; returns the addresses."""
        addresses = []
        configuration = self.folder / "machine.xml"
        configuration.write_text(configuration_text or CONFIGURATION.format(machine=machine))
        for number, hours in enumerate(sorted(ages_hours, reverse=True)):
            disk = self.folder / f"{machine}.raw"
            record = boot_record(prompt or f"{machine} login: ") if boots else b""
            unique = f"{machine} {number} {seed}".encode().ljust(32) * 2048
            disk.write_bytes(record.ljust(64 << 10, b"\0") + unique + bytes(MIB - (128 << 10)))
            time = (self.now - datetime.timedelta(hours=hours)).strftime("%Y%m%dT%H%M%SZ")
            done = self.coldrise.json("backup", machine, "--config", configuration, "--time", time, f"vda=raw:{disk}")
            addresses.append(done["address"])
        return addresses

    def check_boot(self, *addresses):
        for address in addresses:
            # A boot that fails is what some points are for.
            self.coldrise.run("check-boot", address, "--memory", "64M", "--time-limit", "60s")

    def seal(self, address, session):
        """A session that is sealed immediately: a point of its own."""
        self.coldrise.publish(address, session)
        with contextlib.suppress(KeyError):
            return self.coldrise.json("seal", session)["address"]


def make(folder, checks=True):
    """The site that the screenshots show."""
    site = Site(folder)
    site.daily = site.back_up("web01", [24 * day + 0.7 for day in range(18)] + [1.4])
    db = site.back_up("db01", [12 * step + 3 for step in range(14)])
    broken = site.back_up("mail01", [24 * day + 2 for day in range(1, 8)])
    broken += site.back_up("mail01", [2.5], boots=False, seed=1)
    site.back_up("files01", [24 * day + 70 for day in range(9)])
    for name in ("build-runner", "ldap01", "proxy01"):
        site.back_up(name, [24 * day + 5 for day in range(6)])
    if checks:
        site.check_boot(site.daily[-2], site.daily[-4], site.daily[-7], site.daily[-9], db[-1], db[-5], broken[-2], broken[-1])
    site.sealed = site.seal(site.daily[-5], "patch-trial")
    site.coldrise.json("protect", site.daily[2])
    site.coldrise.publish(site.daily[-2], "web01-trial")
    return site

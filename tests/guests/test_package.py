"""The Debian package in a Debian 12 guest with systemd: installed, used, upgraded, removed, purged."""

import json
import os
import shutil
import subprocess

import pytest

from support import filesystems
from support.cli import BUILT, ROOT
from support.snapshot import running_guest

MIB = 1 << 20
# For two packages.
DATA_MIB = 256
OLD, NEW = "0.1.0", "0.1.1"
STATE, REPOSITORY = "/var/lib/coldrise", "/srv/coldrise"
IN_UNIT = "systemd-run --wait --pipe --quiet --uid=coldrise -p LoadCredential=coldrise:/etc/coldrise"
SAID = b"\r\ndemo login: \0"
# cld; xor ax,ax; mov ds,ax; mov si,0x7c1c; next: lodsb; test al,al; jz halt; push ax; mov ah,0x0e; int 0x10;
# pop ax; mov dx,0x3f8; out dx,al; jmp next; halt: hlt; jmp halt. The text begins at 0x7c1c.
SAY = bytes.fromhex("fc31c08ed8be1c7cac84c0740c50b40ecd1058baf803eeebeff4ebfd")


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """The package, and the same as a later version."""
    folder = tmp_path_factory.mktemp("packages")
    environment = {**os.environ, "BUILD_DIR": str(BUILT), "DPKG_DEB_COMPRESSOR_TYPE": "none"}

    def tool(*command):
        subprocess.run(command, check=True, capture_output=True, env=environment, timeout=300)

    tool(ROOT / "packaging/debian/build.sh", folder / f"{OLD}.deb", OLD)
    tool("dpkg-deb", "--raw-extract", folder / f"{OLD}.deb", folder / "files")
    control = folder / "files/DEBIAN/control"
    control.write_text(control.read_text().replace(f"Version: {OLD}\n", f"Version: {NEW}\n"))
    tool("dpkg-deb", "--root-owner-group", "--build", folder / "files", folder / f"{NEW}.deb")
    return folder


def answer(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_package_is_complete(packages):
    package = packages / f"{OLD}.deb"
    depends = answer("dpkg-deb", "--field", package, "Depends")
    for needed in ("libc6 (>=", "librocksdb7.8 (>=", "libnbd0 (>=", "nbdkit (>=", "polkitd"):
        assert needed in depends
    listed = [line.split(maxsplit=5) for line in answer("dpkg-deb", "--contents", package).splitlines()]
    assert {fields[1] for fields in listed} == {"root/root"}
    modes = {fields[5].removeprefix("."): fields[0] for fields in listed}
    assert {mode for path, mode in modes.items() if not path.endswith("/")} == {"-rw-r--r--", "-rwxr-xr-x"}
    for path in ("/usr/bin/coldrise", "/usr/bin/coldrised", "/usr/lib/systemd/system/coldrised.service",
                 "/usr/lib/x86_64-linux-gnu/nbdkit/plugins/nbdkit-coldrise-plugin.so",
                 "/usr/lib/x86_64-linux-gnu/coldrise/coldrise-files-kernel",
                 "/usr/lib/x86_64-linux-gnu/coldrise/coldrise-files-initrd",
                 "/usr/lib/systemd/system/coldrise-run@.service", "/usr/lib/sysusers.d/coldrise.conf",
                 "/usr/share/man/man1/coldrise-backup.1.gz", "/usr/share/man/man8/coldrised.8.gz",
                 "/usr/share/coldrise/web/index.html", "/usr/share/coldrise/web/index.html.gz",
                 "/usr/share/bash-completion/completions/coldrise", "/usr/share/zsh/vendor-completions/_coldrise",
                 "/usr/share/fish/vendor_completions.d/coldrise.fish", "/usr/share/doc/coldrise/copyright"):
        assert path in modes
    assert answer("dpkg-deb", "--info", package, "conffiles").split() == ["/etc/default/coldrise"]


def test_a_purge_removes_all_state_and_keeps_repositories(packages, tmp_path):
    """The script itself, with another folder for the state."""
    state = tmp_path / "state"
    script = answer("dpkg-deb", "--info", packages / f"{OLD}.deb", "postrm")
    assert f"state={STATE}\n" in script
    script = script.replace(f"state={STATE}\n", f"state={state}\n").replace("/etc/coldrise", str(tmp_path / "etc"))
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("deb-systemd-helper", "systemctl"):
        (tools / name).symlink_to("/bin/true")
    (state / "runs").mkdir(parents=True)
    (state / "runs" / "deep").mkdir()
    (state / "runs" / "deep" / "repository.json").touch()

    def purge():
        return subprocess.run(["sh", "-c", script, "postrm", "purge"], check=True, capture_output=True, text=True,
                              env={"PATH": f"{tools}:/usr/bin:/bin"}, timeout=60).stderr

    assert f"there is a repository in {state}/runs/deep" in purge() and (state / "runs/deep/repository.json").exists()
    (state / "runs" / "deep" / "repository.json").unlink()
    assert purge() == "" and not state.exists()
    assert purge() == ""


# ------------------------------------------------------------------------ the guest


SOCKET = "/run/coldrise/coldrised.socket"


class Host:
    """The guest, in the words of the test."""

    def __init__(self, guest):
        self.check = guest.check
        self.status = lambda command: guest.run(command, timeout=120)[0]

    def api(self, path):
        """The answer of the service to root, who has all rights on the Unix socket."""
        return self.check(f"curl --silent --show-error --fail --unix-socket {SOCKET} http://localhost{path}")

    def post(self, path, body):
        """The answer to a JSON body."""
        return self.check(f"curl --silent --show-error --fail-with-body --unix-socket {SOCKET} http://localhost{path} "
                          f"--json @- <<'E'\n{json.dumps(body)}\nE")

    def wait_for_runs(self, job, last):
        """Waits until the job's run of this kind has ended, and the service says that none is running."""
        self.check(f"grep -E -m 1 -- '-{last}.service: (Deactivated|Failed)' < "
                   "<(journalctl --follow --lines all --output cat --identifier systemd)", timeout=500)
        self.check(f"while curl --silent --unix-socket {SOCKET} 'http://localhost/api/v1/runs?job={job}' | "
                   "grep -qF '\"state\":\"running\"'; do sleep 1; done", timeout=120)

    def install(self, version):
        self.check(f"dpkg -i /mnt/{version}.deb", timeout=240)
        assert self.check("dpkg --audit") == ""

    def process(self, unit):
        return self.check(f"systemctl show --property MainPID --value {unit}").strip()

    def plan(self, run, *arguments):
        """Plans a run, as the service does."""
        folder = f"{STATE}/runs/.{run}.planned"
        request = json.dumps({"arguments": list(arguments)})
        self.check(f"install -d -o coldrise -g coldrise -m 700 {STATE}/runs {folder} && cd {folder} && "
                   f"install -o coldrise -g coldrise -m 600 /dev/null lock && "
                   f"install -o coldrise -g coldrise -m 600 /dev/stdin request.json <<'E'\n{request}\nE")

    def start(self, run):
        """Starts a run, as the service does: as its user, who needs the polkit rule."""
        self.check(f"runuser -u coldrise -- systemctl start --no-block --no-ask-password -- coldrise-run@{run}.service")


@pytest.fixture(scope="module")
def guest(packages, tmp_path_factory):
    """The started guest. A second disk holds the packages and a bootable disk."""
    folder = tmp_path_factory.mktemp("guest")
    (folder / "tree").mkdir()
    for package in packages.glob("*.deb"):
        shutil.move(package, folder / "tree")
    sector = (SAY + SAID).ljust(510, b"\0") + b"\x55\xaa"
    (folder / "tree/demo.raw").write_bytes(sector.ljust(MIB, b"\0"))
    data = filesystems.ext4(folder / "data", folder / "tree", DATA_MIB * MIB, "-O", "^has_journal")
    with running_guest(folder, recipe="systemd-guest", data=data) as started:
        started.check("mount -o ro /dev/vdb /mnt")
        yield started


def test_the_life_of_the_package(guest):
    host = Host(guest)

    # Installation: the service runs and offers its link.
    host.install(OLD)
    assert host.check("systemctl is-enabled coldrised").strip() == "enabled"
    assert host.check("systemctl is-active coldrised").strip() == "active"
    assert "kvm" in host.check("id --name --groups coldrise").split()
    assert "/#/setup/" in host.check("journalctl --unit coldrised --output cat")
    assert host.api("/healthz")
    assert host.check(f"stat --format '%U %a' {STATE}").split() == ["coldrise", "700"]

    # A repository whose passphrase only root can read; the units get it as a credential.
    host.check("install -m 600 /dev/stdin /etc/coldrise/passphrase <<< 'correct horse'")
    host.check(f"echo COLDRISE_REPO={REPOSITORY} >> /etc/default/coldrise")
    host.check(f"install -d -o coldrise -g coldrise -m 700 {REPOSITORY}")
    host.check("install -D -g coldrise -m 640 /mnt/demo.raw /srv/images/demo.raw")
    host.check(f"{IN_UNIT} coldrise --repo {REPOSITORY} init")
    host.check("systemctl restart coldrised")
    assert host.status("runuser -u coldrise -- cat /etc/coldrise/passphrase") != 0

    # A job backs up a disk; the boot check that follows turns green. Both are units.
    configuration = "<domain type='kvm'><name>demo</name><memory unit='MiB'>32</memory><vcpu>1</vcpu></domain>"
    host.check(f"install -g coldrise -m 640 /dev/stdin /srv/images/demo.xml <<< \"{configuration}\"")
    job = {"name": "nightly", "kind": "backup", "machines": ["demo"], "disks": {"vda": "raw:/srv/images/{machine}.raw"},
           "config": "/srv/images/{machine}.xml", "boot_check": {"when": "always"}, "age_limit_hours": 26}
    host.post("/api/v1/jobs", job)
    started = host.post("/api/v1/jobs/nightly/start", {})
    host.wait_for_runs("nightly", "check-boot")
    assert '"verdict":"ok"' in host.api("/api/v1/machines/demo")
    runs = json.loads(host.api("/api/v1/runs?job=nightly"))["runs"]
    assert sorted((run["plan"]["command"], run["state"]) for run in runs) == [("backup", "ok"), ("check-boot", "ok")], started
    for run in runs:
        assert host.check(f"journalctl --output cat --unit coldrise-run@{run['id']}"), run["id"]

    # polkit lets the service start and stop its runs, and no other unit.
    for verb, unit in (("stop", "coldrised.service"), ("restart", "coldrise-run@x.service"), ("start", "rescue.service"),
                       ("start", "coldrise-run@x.timer")):
        assert host.status(f"runuser -u coldrise -- systemctl {verb} --no-ask-password {unit}") != 0, (verb, unit)

    # The service and its runs reach a host over SSH, confined as they are: here it lacks libvirt.
    host.check("systemctl is-active ssh")
    address = {"address": "ssh://root@127.0.0.1"}
    assert "does not accept this repository's key" in json.loads(host.post("/api/v1/kvm-hosts/hv1", address))["last_check"]["error"]
    line = json.loads(host.api("/api/v1/kvm-hosts"))["authorized_keys"]
    host.check(f"install -D -m 600 /dev/stdin /root/.ssh/authorized_keys <<< '{line}'")
    assert "starting virsh" in json.loads(host.post("/api/v1/kvm-hosts/hv1/check", {}))["last_check"]["error"]
    run = "20261123T100001Z-8002-host-check"
    host.plan(run, "--repo", REPOSITORY, "host", "check", "hv1")
    host.start(run)
    result = host.check(f"until cat {STATE}/runs/{run}/result.json 2>/dev/null; do sleep 0.2; done")
    assert "starting virsh" in result, result

    # A run lives through an upgrade of the service, which restarts it and keeps settings and state.
    run = "20261123T100002Z-8003-serve-nbd"
    host.plan(run, "--repo", REPOSITORY, "serve", "nbd", "--socket", f"{STATE}/nbd.socket")
    host.start(run)
    host.check(f"until test -S {STATE}/nbd.socket; do sleep 0.2; done")
    before = host.process(f"coldrise-run@{run}"), host.process("coldrised")
    link = host.check(f"sha256sum {STATE}/tls/cert.pem")
    host.install(NEW)
    assert host.check("dpkg-query --show --showformat '${Version}' coldrise") == NEW
    assert host.check("systemctl is-active coldrised").strip() == "active"
    assert host.check(f"sha256sum {STATE}/tls/cert.pem") == link
    assert f"COLDRISE_REPO={REPOSITORY}" in host.check("cat /etc/default/coldrise")
    after = host.process(f"coldrise-run@{run}"), host.process("coldrised")
    assert after[0] == before[0] and after[1] not in (before[1], "0")
    assert run in host.api("/api/v1/runs")

    # A removal ends the service and the run, and leaves state and repository.
    host.check("dpkg --remove coldrise", timeout=240)
    # Processes of others end while it looks.
    assert host.check("find /proc -maxdepth 1 -ignore_readdir_race -user coldrise") == ""
    assert json.loads(host.check(f"cat {STATE}/runs/{run}/result.json"))
    assert host.status("test -e /usr/bin/coldrised") == 1
    host.check(f"test -e {STATE}/coldrised.db -a -e {REPOSITORY}/repository.json -a -e /etc/default/coldrise")

    # A purge leaves the repository and its passphrase.
    host.check("dpkg --purge coldrise", timeout=240)
    assert host.status(f"test -e {STATE}") == 1 and host.status("test -e /etc/default/coldrise") == 1
    host.check(f"test -e {REPOSITORY}/repository.json -a -e /etc/coldrise/passphrase")
    assert host.check("systemctl --failed --no-legend --plain") == ""

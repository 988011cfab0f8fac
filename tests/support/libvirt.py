"""A libvirtd of its own: private folders, no systemd, its guests run as the user libvirt-qemu."""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid

from .nbdserver import DEADLINE_S, wait_until

# Numbers of users in the private list of users: QEMU's, and one who may use libvirt as docs/hosts.md says.
QEMU_USER = 64055
MEMBER, MEMBER_NUMBER = "member", 64056

START = f"""
set -e
cd "$1"
rm -rf run
mkdir -p etc lib cache run
for list in passwd group; do cp /etc/$list $list; done
echo 'libvirt-qemu:x:{QEMU_USER}:{QEMU_USER}::/nonexistent:/usr/sbin/nologin' >> passwd
echo '{MEMBER}:x:{MEMBER_NUMBER}:{MEMBER_NUMBER}::/nonexistent:/bin/sh' >> passwd
sed -i '/^\\(libvirt\\|kvm\\|libvirt-qemu\\):/d' group
printf '%s\n' '{MEMBER}:x:{MEMBER_NUMBER}:' 'libvirt:x:64057:{MEMBER}' 'kvm:x:64058:{MEMBER}' \
    'libvirt-qemu:x:{QEMU_USER}:{MEMBER}' >> group
mount --bind passwd /etc/passwd
mount --bind group /etc/group
# A file, not a device: libvirt asks QEMU again and again whether KVM works if it may open the device, but
# guests may not.
if [ -e /dev/kvm ]; then touch kvm; chmod 0 kvm; mount --bind kvm /dev/kvm; fi
for pair in etc:/etc/libvirt lib:/var/lib/libvirt cache:/var/cache/libvirt run:/run/libvirt; do
    mkdir -p "${{pair#*:}}"
    mount --bind "${{pair%%:*}}" "${{pair#*:}}"
done
# Where its clients look for it.
ln -s "$1/libvirt-sock" run/libvirt-sock
printf '%s\\n' 'security_driver = "none"' 'stdio_handler = "file"' 'namespaces = []' \\
    'cgroup_controllers = []' 'remember_owner = 0' > /etc/libvirt/qemu.conf
printf '%s\\n' "unix_sock_dir = \\"$1\\"" 'auth_unix_rw = "none"' 'unix_sock_group = "libvirt"' \\
    'unix_sock_rw_perms = "0770"' "host_uuid = \\"$4\\"" > libvirtd.conf
exec "$2" -c "$3" /usr/sbin/libvirtd --config "$1/libvirtd.conf" --pid-file "$1/pid"
"""

# The parent of libvirtd, and of its QEMUs, which leave their own parent. libvirt takes a domain for running until its
# process is waited for, and init may do that late.
PARENT = """
import ctypes, os, signal, sys
PR_SET_CHILD_SUBREAPER = 36
ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
libvirtd = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
signal.signal(signal.SIGTERM, lambda *_: os.kill(libvirtd, signal.SIGTERM))
while os.wait()[0] != libvirtd:
    pass
"""


class Libvirt:
    """Started when made; ended with all its domains by `close`."""

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="lv-"))
        self.folder.chmod(0o755)
        # A small file system: libvirtd sees no later mounts.
        self.small = self.folder / "small"
        self.small.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=150M", "small", self.small], check=True)
        # Of disks.
        self.images = self.folder / "images"
        self.images.mkdir()
        self.log = open(self.folder / "log", "w", encoding="utf-8")
        # Two libvirtds of one host move no domain to each other.
        self.host_uuid = str(uuid.uuid4())
        self.uri = f"qemu:///system?socket={self.folder}/libvirt-sock"
        self.start()

    def start(self):
        """Also after `lose_power`: all files are there but those of /run/libvirt."""
        (self.folder / "libvirt-sock").unlink(missing_ok=True)
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", START, "sh", str(self.folder), sys.executable, PARENT,
             self.host_uuid],
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT)
        wait_until((self.folder / "libvirt-sock").exists, "libvirtd")

    def virsh(self, *words):
        done = subprocess.run(["virsh", "--quiet", "--connect", self.uri, *words], capture_output=True,
                              text=True, timeout=DEADLINE_S * 2, check=False)
        assert done.returncode == 0, f"virsh {words}: {done.stderr}"
        return done.stdout.strip()

    def inside(self):
        """The beginning of a command that sees its users: the user of QEMU is not a user of this host."""
        return ["nsenter", "--mount", f"--target={self.process.pid}", "--"]

    def processes(self):
        """Of its mount namespace: libvirtd, QEMU, sshd and what they have started."""
        mine = os.readlink(f"/proc/{self.process.pid}/ns/mnt")
        found = []
        for number in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{number}/ns/mnt") == mine:
                    found.append(int(number))
        return found

    def lose_power(self):
        """Kills them all."""
        for number in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        self.process.wait(timeout=DEADLINE_S)

    def state(self, name):
        return self.virsh("domstate", "--reason", name)

    def domains(self):
        return self.names()

    def names(self, *options):
        """Of domains: a name can have spaces."""
        return [line.strip() for line in self.virsh("list", "--name", *options).splitlines() if line.strip()]

    def clear(self):
        """Removes all domains and images."""
        for name in self.domains():
            # It may exit meanwhile.
            with contextlib.suppress(AssertionError):
                self.virsh("destroy", name)
        assert not self.domains()
        for name in self.names("--all"):
            self.virsh("undefine", "--checkpoints-metadata", "--snapshots-metadata", "--nvram", name)
        shutil.rmtree(self.images)
        self.images.mkdir()

    def close(self):
        self.clear()
        self.process.terminate()
        self.process.wait(timeout=DEADLINE_S)
        self.log.close()
        subprocess.run(["umount", self.small], check=True)
        # The folder is not in use: the mounts were in the process's own namespace.
        shutil.rmtree(self.folder)
        assert not os.path.exists(self.folder)

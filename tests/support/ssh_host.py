"""A hypervisor's host that is reached over SSH: an sshd in the mount namespace of a libvirtd of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys

from .libvirt import MEMBER, MEMBER_NUMBER, Libvirt
from .line import FAR_ADDRESS
from .nbdserver import DEADLINE_S, wait_until
from .ports import free_port

CONFIG = """
Port {port}
ListenAddress {address}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile {folder}/authorized_keys
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
SetEnv HOME={folder}/home-of-{user} XDG_CACHE_HOME={folder}/cache-of-{user} TMPDIR={folder}/scratch XDG_RUNTIME_DIR={folder}/home-of-{user} PATH={path}
{more}
"""

# HOME is empty: a login shell's own settings of this machine's root take time. Unlike systemd's, QEMU's user can enter the runtime folder.

# sshd wants it, and init makes it only where the unit runs.
SSHD = 'mkdir -p /run/sshd && exec /usr/sbin/sshd -D -e -f "$1"'


class SshHost:
    """Started when made; ended with its libvirtd by `close`. `line` leads to its sshd, if there is one."""

    def __init__(self, user="root", line=None):
        self.user, self.line = user, line
        self.near = FAR_ADDRESS if line else "127.0.0.1"
        self.libvirt = Libvirt()
        self.folder = self.libvirt.folder
        self.scratch = self.folder / "scratch"
        self.keys = self.folder / "authorized_keys"
        self.keys.touch()
        self.cache = self.folder / f"cache-of-{user}" / "coldrise"
        for folder in (self.scratch, self.cache.parent, self.folder / f"home-of-{user}"):
            folder.mkdir()
            os.chown(folder, MEMBER_NUMBER if user == MEMBER else 0, -1)
        self.port = free_port()
        self.sshd = None
        self.log = open(self.folder / "sshd.log", "w", encoding="utf-8")
        self.new_key()
        self.start()

    def new_key(self):
        key = self.folder / "host_key"
        key.unlink(missing_ok=True)
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)

    def start(self, more="", path="/usr/bin:/bin"):
        config = self.folder / "sshd_config"
        settings = {"address": self.near, "port": self.port, "folder": self.folder, "user": self.user, "path": path}
        config.write_text(CONFIG.format(more=more, **settings), encoding="utf-8")
        command = [*self.libvirt.inside(), "sh", "-c", SSHD, "sh", config]
        if self.line:
            command = self.line.far.command(*command)
        self.sshd = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=subprocess.STDOUT,
                                     start_new_session=True)
        wait_until(self.answers, "sshd")

    def answers(self):
        connect = self.line.near.connect if self.line else lambda *place: socket.create_connection(place[::-1], timeout=5)
        with contextlib.suppress(OSError), connect(self.port, self.near) as near:
            return near.recv(4) == b"SSH-"
        return False

    def stop(self):
        """Ends sshd and all connections, as a host that is cut off."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.sshd.pid, signal.SIGKILL)
        self.sshd.wait(timeout=DEADLINE_S)
        # Each connection is a process group of its own. All are stopped before one ends: the program on the host would see the
        # end of its connection, and remove its folder.
        sessions = set()
        while more := set(self.sessions()) - sessions:
            sessions |= more
            _send(signal.SIGSTOP, more)
        _send(signal.SIGKILL, sessions)

    def reboot(self):
        """Ends everything of the host at once, then starts its sshd and its libvirtd."""
        self.libvirt.lose_power()
        self.sshd.wait(timeout=DEADLINE_S)
        self.libvirt.start()
        self.start()

    def sessions(self):
        """The processes of connections."""
        listed = subprocess.run(["pgrep", "-f", f"coldrise-host.* (serve|connect)|sshd: {self.user}"], capture_output=True, text=True,
                                check=False)
        mine = os.readlink(f"/proc/{self.libvirt.process.pid}/ns/mnt")
        found = []
        for number in map(int, listed.stdout.split()):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{number}/ns/mnt") == mine:
                    found.append(number)
        return found

    @property
    def address(self):
        return f"ssh://{self.user}@{self.near}:{self.port}"

    def add_to(self, coldrise, name="hv1"):
        """Adds the host, and lets the repository log in."""
        added = coldrise.json("host", "add", name, self.address)
        with self.keys.open("a", encoding="utf-8") as keys:
            keys.write(added["authorized_keys"] + "\n")
        return added

    def close(self):
        self.stop()
        self.log.close()
        self.libvirt.close()


def _send(number, processes):
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


if __name__ == "__main__":
    host = SshHost()
    print(host.address, host.folder, flush=True)
    sys.stdin.read()
    host.close()

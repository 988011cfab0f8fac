"""A small /dev/shm, in a mount namespace of its own."""

import subprocess


class SmallSharedMemory:
    """Commands run in it see a /dev/shm of this many KiB."""

    def __init__(self, kib):
        setup = f"mount -t tmpfs -o size={kib}k tmpfs /dev/shm && echo ready && exec sleep infinity"
        self.process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", setup],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert self.process.stdout.readline() == b"ready\n"

    def command(self, *arguments):
        """The same command, run there."""
        enter = ["nsenter", "--target", self.process.pid, "--mount", "--"]
        return [str(argument) for argument in (*enter, *arguments)]

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

"""A repository mounted on a folder, and its files' properties."""

import errno
import os
import pathlib
import signal
import subprocess

from support.nbdserver import DEADLINE_S, wait_until


class Mounted:
    """One `coldrise mount` in the foreground, run as `user`."""

    def __init__(self, coldrise, folder, *options, user=None):
        self.folder = pathlib.Path(folder)
        # Even stat fails on a folder with a killed mount.
        if not is_mounted(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        self.log_path = self.folder.with_name(self.folder.name + ".log")
        self.log = open(self.log_path, "a", encoding="utf-8")
        keywords = {} if user is None else {"user": user, "group": "nogroup", "extra_groups": []}
        self.process = coldrise.start("mount", self.folder, *options, stdout=subprocess.PIPE,
                                      stderr=self.log, **keywords)  # fmt: skip
        # Either the line or, at its end, nothing.
        self.said = self.process.stdout.readline()
        if not self.said:
            code = self.process.wait(timeout=DEADLINE_S)
            self.log.close()
            raise MountFailed(code, self.messages())

    def __truediv__(self, path):
        return self.folder / path

    def messages(self):
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def is_mounted(self):
        return is_mounted(self.folder)

    def ask_to_end(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def wait(self, code=0):
        """Waits for its end without an error; returns its last output."""
        output, _ = self.process.communicate(timeout=DEADLINE_S)
        self.log.close()
        assert self.process.returncode == code, self.messages()
        assert not self.is_mounted()
        return output

    def stop(self):
        self.ask_to_end()
        return self.wait()

    def kill(self):
        """Ends it like a crash: the dead mount stays."""
        self.process.kill()
        self.process.communicate(timeout=DEADLINE_S)
        self.log.close()

    def clear(self):
        """Cleans up after a test."""
        if self.process.poll() is None:
            self.kill()
        while self.is_mounted():
            subprocess.run(["umount", "-l", self.folder], check=True)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            if kind is None:
                self.stop()
        finally:
            self.clear()


class MountFailed(Exception):
    """It ended before it was mounted."""

    def __init__(self, code, messages):
        super().__init__(f"coldrise mount ended with {code}: {messages}")
        self.code = code
        self.messages = messages


def is_mounted(folder):
    lines = pathlib.Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    return any(line.split()[4] == str(folder) for line in lines)


def wait_until_unmounted(folder):
    wait_until(lambda: not is_mounted(folder), f"{folder} to be unmounted")


def data_ranges(path):
    """The extents by SEEK_DATA and SEEK_HOLE: [(offset, length)]."""
    found = []
    with open(path, "rb") as file:
        end = os.fstat(file.fileno()).st_size
        at = 0
        while at < end:
            try:
                start = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                assert error.errno == errno.ENXIO
                break
            at = os.lseek(file.fileno(), start, os.SEEK_HOLE)
            assert at > start
            found.append((start, at - start))
    return found


def stored_bytes(path):
    return os.stat(path).st_blocks * 512


def refused(call, *arguments):
    """The errno of a failing call."""
    try:
        call(*arguments)
    except OSError as error:
        return errno.errorcode[error.errno]
    raise AssertionError(f"{call.__name__}{arguments} was allowed")

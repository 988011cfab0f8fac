"""File operations that fail, or at which the process is killed: one call at a time."""

import collections
import errno
import os
import pathlib
import struct
import subprocess

_SOURCE = pathlib.Path(__file__).with_name("storage_shim.c")
# As in the shim.
FAMILIES = ("open", "read", "write", "sync", "rename", "unlink", "truncate", "mkdir", "link",
            "allocate", "lock", "map", "list", "stat", "close")  # fmt: skip
# They take no space.
_NEVER_FULL = ("read", "unlink", "lock", "map", "list", "stat")
_ACTIONS = {"short": -1, "kill before": -2, "kill after": -3,
            "EIO": errno.EIO, "ENOSPC": errno.ENOSPC}  # fmt: skip
_HEAD = struct.Struct("=iiQ")
_COUNTS = struct.Struct(f"={len(FAMILIES)}Q")
_PATH_MAX = 4096

Fault = collections.namedtuple("Fault", "family action number")
Fault.__str__ = lambda fault: f"{fault.action} at {fault.family} {fault.number}"


def build_shim(directory):
    """The library to preload."""
    library = directory / "storage_shim.so"
    subprocess.run(
        ["cc", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, _SOURCE, "-ldl"],
        check=True,
    )
    return library


class Faults:
    """Steers the processes that are started with `environment`."""

    def __init__(self, library, directory, root, fault=None):
        self.library = library
        self.plan = directory / "faults"
        family, action, number = (0, 0, 0) if fault is None else (
            FAMILIES.index(fault.family), _ACTIONS[fault.action], fault.number)  # fmt: skip
        root = os.fsencode(root).ljust(_PATH_MAX, b"\0")
        content = _HEAD.pack(family, action, number) + bytes(_COUNTS.size) + root
        self.plan.write_bytes(content)

    def environment(self):
        return {"LD_PRELOAD": str(self.library), "COLDRISE_TEST_FAULTS": str(self.plan)}

    def counts(self):
        """Calls so far, by family."""
        content = self.plan.read_bytes()
        return dict(zip(FAMILIES, _COUNTS.unpack_from(content, _HEAD.size)))


def faults_of(counts, actions):
    """Every fault of an operation that made this many calls."""
    found = []
    for family, count in counts.items():
        for action in actions:
            if action == "short" and family not in ("read", "write"):
                continue
            if action == "ENOSPC" and family in _NEVER_FULL:
                continue
            found += [Fault(family, action, number) for number in range(1, count + 1)]
    return found


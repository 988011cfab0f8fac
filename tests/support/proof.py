"""An independent checker of the proofs of `coldrise attest`: hashlib, json and OpenSSL, as docs/recovery.md says."""

import base64
import hashlib
import json
import os
import pathlib
import subprocess
import tempfile

LEAF = 64 << 10


def leaf(data):
    return hashlib.sha256(b"\0" + data.ljust(LEAF, b"\0")).digest()


def node(left, right):
    return hashlib.sha256(b"\1" + left + right).digest()


def tree(hashes, zero):
    """The root over hashes of one height; `zero` is that of a subtree of zeroes of this height."""
    while len(hashes) > 1:
        hashes += [zero] * (len(hashes) % 2)
        hashes = [node(*pair) for pair in zip(hashes[::2], hashes[1::2])]
        zero = node(zero, zero)
    return hashes[0]


def root(path, size):
    """The root of a disk image; holes are not read."""
    leaves = [leaf(b"")] * max(16, -(-size // LEAF))
    with open(path, "rb") as file:
        at = 0
        while at < size:
            try:
                data = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                break
            at = data // LEAF * LEAF
            leaves[at // LEAF] = leaf(os.pread(file.fileno(), min(LEAF, size - at), at))
            at += LEAF
    return tree(leaves, leaf(b"")).hex()


def signed_bytes(statement):
    return json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def is_signed(proof):
    """OpenSSL's verdict on the signature."""
    with tempfile.TemporaryDirectory(prefix="coldrise-proof-") as folder:
        folder = pathlib.Path(folder)
        (folder / "key").write_text(proof["public_key"], encoding="ascii")
        (folder / "statement").write_bytes(signed_bytes(proof["statement"]))
        (folder / "signature").write_bytes(base64.b64decode(proof["signature"]))
        done = subprocess.run(
            ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", folder / "key", "-rawin", "-in",
             folder / "statement", "-sigfile", folder / "signature"], capture_output=True, check=False)
        return done.returncode == 0


def sections_lead_to_roots(proof):
    """Whether the sections of every disk are a level of the tree of its root."""
    for disk in proof["statement"]["disks"]:
        found = proof["sections"][disk["disk"]]
        zero, size = leaf(b""), LEAF
        while size < found["section_bytes"]:
            zero, size = node(zero, zero), 2 * size
        hashes = [bytes.fromhex(text) for text in found["hashes"]]
        if tree(hashes, zero).hex() != disk["root"]:
            return False
    return True

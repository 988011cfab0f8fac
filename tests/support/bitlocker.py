"""BitLocker volumes, as Windows 10 makes them: metadata version 2, AES-XTS-128."""

import hashlib
import os
import pathlib
import struct

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESCCM

SECTOR = 512
AREA = 64 << 10
HEADER = 8192
ROUNDS = 1 << 20
GUID = bytes.fromhex("3bd66749292ed84a8399f6a339e3d001")
CLEAR, RECOVERY, PASSWORD = 0, 0x0800, 0x2000


def volume(path, content, recovery_key=None, password=None):
    """A volume with that image of NTFS, and a clear key if it has no other one: its protection is suspended."""
    plain = pathlib.Path(content).read_bytes()
    # Three copies of the metadata, and the file system's first sectors. Windows keeps files of NTFS there.
    free = [at for at in range(AREA, len(plain) - AREA, AREA) if not any(plain[at:at + AREA])]
    *areas, moved = free[:4]
    master, key = os.urandom(32), os.urandom(32)
    protectors = b""
    if recovery_key:
        numbers = struct.pack("<8H", *(int(group) // 11 for group in recovery_key.split("-")))
        protectors += stretched(RECOVERY, hashlib.sha256(numbers).digest(), master)
    if password:
        wide = password.encode("utf-16-le")
        protectors += stretched(PASSWORD, hashlib.sha256(hashlib.sha256(wide).digest()).digest(), master)
    if not protectors:
        clear = os.urandom(32)
        protectors = protector(CLEAR, entry(0, 1, struct.pack("<I", 0x2000) + clear) + wrapped(0, 0x2000, master, clear))
    entries = protectors + wrapped(3, 0x8004, key, master) + entry(15, 15, struct.pack("<QQ", moved, HEADER))
    block = struct.pack("<8sHHHHQIIQQQQ", b"-FVE-FS-", 64, 2, 4, 4, len(plain), 0, HEADER // SECTOR, *areas, moved)
    size = 48 + len(entries)
    header = struct.pack("<IIII16sIHHQ", size, 1, 48, size, b"0123456789abcdef", 1, 0x8004, 0, 133_000_000_000_000_000)
    metadata = block + header + entries
    encrypted = bytearray(transformed(plain, key, 0))
    encrypted[moved:moved + HEADER] = transformed(plain[:HEADER], key, moved)
    for area in areas:
        encrypted[area:area + AREA] = metadata.ljust(AREA, b"\0")
    first = b"\xeb\x58\x90-FVE-FS-" + struct.pack("<H", SECTOR)
    encrypted[:HEADER] = (first.ljust(160, b"\0") + GUID + struct.pack("<QQQ", *areas)).ljust(SECTOR - 2, b"\0") + b"\x55\xaa" + bytes(
        HEADER - SECTOR)
    pathlib.Path(path).write_bytes(encrypted)
    return path


def entry(kind, value, content):
    return struct.pack("<HHHH", 8 + len(content), kind, value, 1) + content


def wrapped(kind, method, key, with_key):
    """A key, encrypted with another one."""
    nonce = os.urandom(12)
    sealed = AESCCM(with_key, tag_length=16).encrypt(nonce, entry(0, 1, struct.pack("<I", method) + key), None)
    return entry(kind, 5, nonce + sealed[-16:] + sealed[:-16])


def protector(protection, content):
    return entry(2, 8, os.urandom(16) + bytes(10) + struct.pack("<H", protection) + content)


def stretched(protection, initial, master):
    """The volume's key, encrypted with what the hash of a password gives after a million rounds."""
    salt, last = os.urandom(16), bytes(32)
    for count in range(ROUNDS):
        last = hashlib.sha256(last + initial + salt + count.to_bytes(8, "little")).digest()
    return protector(protection, entry(0, 3, struct.pack("<I", 0x1000) + salt) + wrapped(0, 0x2000, master, last))


def transformed(plain, key, offset):
    """The sectors that begin at this offset of the volume, encrypted."""
    encrypted = []
    for at in range(0, len(plain), SECTOR):
        tweak = ((offset + at) // SECTOR).to_bytes(16, "little")
        encrypted.append(Cipher(algorithms.AES(key), modes.XTS(tweak)).encryptor().update(plain[at:at + SECTOR]))
    return b"".join(encrypted)

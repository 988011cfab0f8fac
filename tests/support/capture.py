"""The captured traffic of a line, as its ends wrote it: the streams of all TCP connections."""

import struct


def streams(path):
    """Every direction of every connection, in order: (source port, destination port) and its bytes."""
    parts = {}
    with open(path, "rb") as file:
        while length := file.read(2):
            packet = file.read(struct.unpack("=H", length)[0])
            if packet[0] >> 4 != 4 or packet[9] != 6:
                continue
            total, start = struct.unpack(">H", packet[2:4])[0], (packet[0] & 15) * 4
            source, destination, number = struct.unpack(">HHI", packet[start : start + 8])
            content = packet[start + (packet[start + 12] >> 4) * 4 : total]
            if content:
                key = (packet[12:20], source, destination)
                parts.setdefault(key, {}).setdefault(number, content)
    for (_, source, destination), numbered in parts.items():
        yield (source, destination), _joined(numbered)


def _joined(numbered):
    """A packet that was sent again may begin or end elsewhere. No stream here is longer than 4 GiB."""
    first = min(numbered)
    # A stream whose numbers began again at zero.
    if max(numbered) - first > 1 << 31:
        first = min(number for number in numbered if number > 1 << 31)
    joined = bytearray()
    for offset, content in sorted(((number - first) % (1 << 32), content) for number, content in numbered.items()):
        joined[offset : offset + len(content)] = content if offset <= len(joined) else bytes(offset - len(joined)) + content
    return bytes(joined)


def found(path, secrets):
    """The names of those of `secrets` ({name: bytes}) that occur in any stream; and the bytes of all streams."""
    names, count = set(), 0
    for _, content in streams(path):
        count += len(content)
        names |= {name for name, secret in secrets.items() if secret in content}
    return names, count

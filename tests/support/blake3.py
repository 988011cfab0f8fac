"""BLAKE3, implemented from its paper, to check this project's hash function independently."""

import struct

_START = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
_ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
_MIXED = ((0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
          (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14))
_MASK = 0xFFFFFFFF
_CHUNK, _BLOCK = 1024, 64
_CHUNK_START, _CHUNK_END, _PARENT, _ROOT, _CONTEXT, _MATERIAL = 1, 2, 4, 8, 32, 64


def _compress(chain, words, counter, length, flags):
    state = [*chain, *_START[:4], counter & _MASK, counter >> 32, length, flags]
    for _ in range(7):
        for place, (a, b, c, d) in enumerate(_MIXED):
            va, vb, vc, vd = state[a], state[b], state[c], state[d]
            va = (va + vb + words[2 * place]) & _MASK
            vd ^= va
            vd = (vd >> 16 | vd << 16) & _MASK
            vc = (vc + vd) & _MASK
            vb ^= vc
            vb = (vb >> 12 | vb << 20) & _MASK
            va = (va + vb + words[2 * place + 1]) & _MASK
            vd ^= va
            vd = (vd >> 8 | vd << 24) & _MASK
            vc = (vc + vd) & _MASK
            vb ^= vc
            state[a], state[b], state[c], state[d] = va, (vb >> 7 | vb << 25) & _MASK, vc, vd
        words = [words[place] for place in _ORDER]
    return [state[place] ^ state[place + 8] for place in range(8)]


def _chunk(content, counter, root, start, mode):
    chain = start
    blocks = [content[at : at + _BLOCK] for at in range(0, len(content), _BLOCK)] or [b""]
    for number, block in enumerate(blocks):
        is_last = number == len(blocks) - 1
        flags = mode | (_CHUNK_START if number == 0 else 0) | (_CHUNK_END | root if is_last else 0)
        chain = _compress(chain, struct.unpack("<16I", block.ljust(_BLOCK, b"\0")), counter, len(block), flags)
    return chain


def _tree(content, counter, root, start, mode):
    chunks = -(-len(content) // _CHUNK)
    if chunks <= 1:
        return _chunk(content, counter, root, start, mode)
    left = 1 << (chunks - 1).bit_length() - 1
    sides = (_tree(content[: left * _CHUNK], counter, 0, start, mode)
             + _tree(content[left * _CHUNK :], counter + left, 0, start, mode))
    return _compress(start, sides, 0, _BLOCK, mode | _PARENT | root)


def blake3(content):
    return struct.pack("<8I", *_tree(content, 0, _ROOT, _START, 0))


def derived_key(context, material):
    """BLAKE3's mode for deriving keys."""
    start = _tree(context, 0, _ROOT, _START, _CONTEXT)
    return struct.pack("<8I", *_tree(material, 0, _ROOT, start, _MATERIAL))

"""Publish, first byte and seal, with a repository of a million chunks and sessions
that captured gigabytes. Wall times of the commands, including process start."""

from __future__ import annotations

import time

from bench.support import fio, images
from bench.support.coldrise import Coldrise
from bench.support.commands import settle
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.fio import Load
from bench.support.nbd import Connection
from bench.support.setting import Setting

SUMMARY = "publish, first byte and seal with a million chunks"

_CHUNK_BYTES = 4096
_PUBLISH = "publish"
_FIRST_BYTE = "publish's end to the first byte, server started then"
_FIRST_BYTE_SERVED = "publish's end to the first byte, server running"
_SEAL_SERVED = "seal, while served"
_SEAL = "seal, not served"
_MACHINE = "many"


def measure(setting: Setting) -> None:
    folder = setting.folder("million")
    disk = images.many_chunks(setting.store / "images", setting.sizes.many_chunks_bytes, _CHUNK_BYTES)
    chunks = disk.size_bytes // _CHUNK_BYTES
    if setting.program is not None:
        coldrise = setting.new_coldrise(folder / "repository")
        coldrise.init(chunk_size="4K", compression=setting.compression)
        coldrise.call("backup", _MACHINE, f"vda=raw:{disk.path}")
        settle(setting.work)
        coldrise.preread()
        _publish(setting, coldrise, f"{chunks:,} chunks of 4 KiB in the repository")
        _seal(setting, coldrise)
    else:
        # There is no peer here: this only records that Coldrise was omitted.
        setting.race(_PUBLISH, {COLDRISE: dict}, 0)
    images.removed(folder)


def _first_byte_ms(connect_to, export: str, since: float) -> float:
    with Connection(connect_to, export) as connection:
        connection.read(0, 4096)
        return (time.monotonic() - since) * 1000


def _publish(setting: Setting, coldrise: Coldrise, note: str) -> None:
    turn = 0

    def sample() -> dict[str, float]:
        nonlocal turn
        turn += 1
        first, second = f"p{turn}a", f"p{turn}b"
        figures = {_PUBLISH: coldrise.publish(_MACHINE, first) * 1000}
        published = time.monotonic()
        with coldrise.serve(setting.socket("coldrise")) as server:
            figures[_FIRST_BYTE] = _first_byte_ms(server.socket_path, f"live/{first}/vda", published)
            coldrise.publish(_MACHINE, second)
            published = time.monotonic()
            figures[_FIRST_BYTE_SERVED] = _first_byte_ms(
                server.socket_path, f"live/{second}/vda", published
            )
        coldrise.discard(first)
        coldrise.discard(second)
        return figures

    results = setting.race(_PUBLISH, {COLDRISE: sample}, setting.sizes.rounds * 2)
    limits = {_PUBLISH: 50, _FIRST_BYTE: 250, _FIRST_BYTE_SERVED: 250}
    for title, limit_ms in limits.items():
        setting.add(
            Row("publish_seal", title, "many-chunks", "ms", column(results, title),
                [Target(at_most=limit_ms)], "", note)
        )


def _seal(setting: Setting, coldrise: Coldrise) -> None:
    captured = setting.sizes.captured_bytes
    capture = Load("write", "256k", 4, captured, is_pass=True)
    turn = 0

    def sample_one(title: str) -> float:
        nonlocal turn
        turn += 1
        session = f"s{turn}"
        coldrise.publish(_MACHINE, session)
        with coldrise.serve(setting.socket("coldrise")) as server:
            export = f"live/{session}/vda"
            fio.over_nbd(capture, server.uri(export))
            with Connection(server.socket_path, export) as connection:
                connection.flush()
                settle(setting.work)
                if title == _SEAL_SERVED:
                    took_s = coldrise.call_timed("seal", session)
        if title == _SEAL:
            took_s = coldrise.call_timed("seal", session)
        coldrise.discard(session)
        return took_s * 1000

    def sample() -> dict[str, float]:
        return {title: sample_one(title) for title in (_SEAL_SERVED, _SEAL)}

    results = setting.race("seal", {COLDRISE: sample}, setting.sizes.few_rounds)
    note = f"{captured / images.GIB:.3g} GiB captured and flushed before"
    for title in (_SEAL_SERVED, _SEAL):
        setting.add(
            Row("publish_seal", title, "many-chunks", "ms", column(results, title),
                [Target(at_most=100)], capture.text(), note)
        )

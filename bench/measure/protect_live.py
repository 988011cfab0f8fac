"""A guest whose writes `protect-live` captures, against the same guest without it."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import Iterator

from bench.support.coldrise import Coldrise
from bench.support.figures import COLDRISE, Row, Target, column
from bench.support.following import PATIENCE_S, Following, followed_guest
from bench.support.setting import Setting

SUMMARY = "a guest that is followed every 5 s, against one that is not"

_PLAIN = "not followed"
_RATE = "random write 8K + fsync in the guest"
_TAIL = "the same, 99th percentile"


@contextmanager
def _following(coldrise: Coldrise, monitor: object) -> Iterator[Following]:
    following = Following(coldrise, ["--from", f"qmp:{monitor}", "--every", "5s"])
    try:
        following.event("round")
        yield following
    finally:
        following.end()


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    folder = setting.folder("protect-live")
    monitor = setting.socket("followed-qmp")
    coldrise = setting.new_coldrise(folder / "repository")
    coldrise.init(chunk_size=setting.chunk_size, compression=setting.compression)
    seconds = 5 * setting.sizes.seconds
    command = ("fio --name=t --filename=/root/t --rw=randwrite --bs=8k --size=128M --fsync=1 --ioengine=psync"
               f" --time_based --runtime={seconds} --output-format=json")
    with followed_guest(setting, folder, monitor) as guest:
        guest.check(command, timeout=PATIENCE_S)

        def load() -> dict[str, float]:
            said = guest.check(command, timeout=PATIENCE_S)
            job = json.loads(said[said.index("{"):])["jobs"][0]
            tail = job["sync"]["lat_ns"]["percentile"]["99.000000"] / 1e6
            return {_RATE: job["write"]["iops"], _TAIL: tail}

        def followed() -> dict[str, float]:
            with _following(coldrise, monitor):
                return load()

        results = setting.race(_RATE, {COLDRISE: followed, _PLAIN: load}, setting.sizes.rounds)
    setting.add(Row("protect_live", _RATE, "guest", "IO/s", column(results, _RATE), [Target(_PLAIN, at_least=0.97)], command))
    setting.add(Row("protect_live", _TAIL, "guest", "ms", column(results, _TAIL), [], command))

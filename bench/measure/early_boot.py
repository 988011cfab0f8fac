"""Boots the guest at the other site while its copy is on its way: with nothing, a part, and all of it there."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from bench.measure.boot import boot_s
from bench.support.figures import COLDRISE, Failure, Row, column
from bench.support.images import removed
from bench.support.offsite import USUAL, Sites
from bench.support.setting import Setting
from tests.support.guest import kvm_works, nbd_disk

SUMMARY = "boot of the guest at the other site while its copy comes over 45 Mbit/s"

_WHOLE = "all of it there"
_NOTHING, _TRACED = "nothing there, without a boot trace", "nothing there, with a boot trace"
_PARTS = {"5 % there": 5, "50 % there": 50}
_LIMIT_S = 600.0


def measure(setting: Setting) -> None:
    if setting.program is None:
        return
    rounds = setting.sizes.few_rounds
    results = setting.race("early_boot", {COLDRISE: lambda: _round(setting)}, rounds)
    accelerator = "KVM" if kvm_works() else "emulation (no KVM here)"
    subject = USUAL.text()
    for title in (_WHOLE, _NOTHING, _TRACED, *_PARTS):
        setting.add(Row("early_boot", f"boot at the other site, {title}", subject, "s", column(results, title), [], "",
                        f"QEMU, {accelerator}; QEMU's start to the prompt, the copy goes on meanwhile"))


def _round(setting: Setting) -> dict[str, float]:
    took = {title: _boot(setting, percent, True) for title, percent in ((_WHOLE, 100), *_PARTS.items(), (_TRACED, 0))}
    return took | {_NOTHING: _boot(setting, 0, False)}


def _boot(setting: Setting, percent: int, has_trace: bool) -> float:
    folder = setting.folder("early_boot")
    line = USUAL.line(folder)
    try:
        with Sites(setting.program, line, folder).paired() as sites:
            guest = setting.guest()
            sites.near.call("backup", "guest", f"vda=raw:{guest.path}")
            if has_trace:
                _served_boot(setting, sites.near, "traced", folder / "near.socket")
            return _boot_there(setting, sites, percent, folder)
    finally:
        line.close()
        removed(folder)


def _boot_there(setting: Setting, sites: Sites, percent: int, folder: Path) -> float:
    command = sites.line.near.command(*sites.near.command("copy", "--to", "far"))
    with subprocess.Popen(command, env={**os.environ, **sites.near.env}, stdin=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as copy:
        try:
            if percent == 100:
                copy.wait(_LIMIT_S)
            else:
                _wait_for(sites, percent)
            return _served_boot(setting, sites.far, "early", folder / "far.socket")
        finally:
            copy.terminate()


def _wait_for(sites: Sites, percent: int) -> None:
    until = time.monotonic() + _LIMIT_S
    while not any(incoming["percent_here"] >= percent for incoming in sites.far.call("list").get("coming", [])):
        if time.monotonic() > until:
            raise Failure(f"{percent} % did not arrive")
        time.sleep(0.2)


def _served_boot(setting: Setting, coldrise, session: str, socket: Path) -> float:
    coldrise.publish("guest", session)
    with coldrise.serve(socket) as server:
        took_s = boot_s(setting, nbd_disk(server.uri(f"live/{session}/vda")))
    coldrise.discard(session)
    return took_s

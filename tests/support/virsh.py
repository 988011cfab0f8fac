"""A virsh with additional or different effects."""

import contextlib
import os
import shutil

AWAY = "echo 'error: failed to connect to the hypervisor' >&2; exit 1"


def path_with_virsh(folder, before="", after=""):
    """A PATH whose virsh runs these lines of a shell before and after the real one, which has ended with $code."""
    place = folder / "changed-virsh"
    place.mkdir()
    program = place / "virsh"
    program.write_text(f'#!/bin/sh\n{before}\n{shutil.which("virsh")} "$@"\ncode=$?\n{after}\nexit $code\n', encoding="utf-8")
    program.chmod(0o755)
    return f"{place}:{os.environ['PATH']}"


@contextlib.contextmanager
def changed_virsh(folder, before="", after=""):
    """Within it, programs find such a virsh."""
    kept = os.environ["PATH"]
    os.environ["PATH"] = path_with_virsh(folder, before, after)
    try:
        yield
    finally:
        os.environ["PATH"] = kept
        shutil.rmtree(folder / "changed-virsh")


def on(request, lines):
    """Lines for requests that contain these words."""
    return f"case \" $* \" in *'{request}'*) {lines};; esac"


def skip(clock, seconds):
    """Lines that skip some seconds of the BothClocks."""
    return f"printf '%+d\\n' $(($(cat {clock.file}) + {seconds})) > {clock.file}.new; mv {clock.file}.new {clock.file}"


@contextlib.contextmanager
def killed_at(folder, moment, request):
    """Within it the first virsh whose words contain `request` kills its caller, before or after it does the request."""
    done = folder / "has-killed"
    end = "kill -9 $PPID; exit 1" if moment == "before" else "hit=1"
    with changed_virsh(folder, f"hit=\n{on(request, f'if mkdir {done} 2>/dev/null; then {end}; fi')}",
                       "if [ $hit ]; then kill -9 $PPID; fi"):
        yield
    assert done.exists(), f"nobody asked for {request}"
    done.rmdir()

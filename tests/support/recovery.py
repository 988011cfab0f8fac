"""A running `coldrise recover --to libvirt`."""

import contextlib
import json
import subprocess


class Recovery:
    """Its messages go to a file; with a clock, it waits for nothing."""

    def __init__(self, coldrise, messages, what, *options, clock=None):
        self.messages = open(messages, "w+", encoding="utf-8")
        self.clock = clock
        with clock.of(coldrise) if clock else contextlib.nullcontext():
            self.process = coldrise.start("recover", what, "--to", "libvirt", "--json", *options, stdout=subprocess.PIPE,
                                          stderr=self.messages, start_new_session=True)
        line = self.process.stdout.readline()
        assert line, self.said()
        self.event = json.loads(line)

    def said(self):
        self.messages.seek(0)
        return self.messages.read()

    def kill(self):
        self.process.kill()
        self.process.wait()

    def end(self):
        """The final answer."""
        if self.clock:
            self.clock.end_of(self.process)
        self.process.wait(timeout=60)
        assert self.process.returncode == 0, self.said()
        return json.loads(self.process.stdout.read().splitlines()[-1])

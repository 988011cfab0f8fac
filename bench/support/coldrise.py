"""Coldrise's command line, as the measurements use it."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

from .commands import preread, run, timed
from .figures import Failure
from .servers import Server


class Coldrise:
    """One repository and the program that works on it. The passphrase lives in a
    file beside the repository."""

    def __init__(self, program: Path, repository: Path) -> None:
        self.program = program
        self.repository = repository
        passphrase = repository.with_name(repository.name + ".passphrase")
        if not passphrase.exists():
            passphrase.parent.mkdir(parents=True, exist_ok=True)
            passphrase.touch(mode=0o600)
            passphrase.write_text(secrets.token_hex(16) + "\n")
        self.env = {
            "COLDRISE_REPO": str(repository),
            "COLDRISE_RUNS": "none",
            "COLDRISE_PASSPHRASE_FILE": str(passphrase),
        }

    def command(self, *words: object) -> list[object]:
        return [self.program, "--json", *words]

    def call(self, *words: object) -> dict:
        """Runs a command; its last line of output is one JSON object."""
        lines = run(self.command(*words), env=self.env).strip().splitlines()
        if not lines:
            return {}
        try:
            answer = json.loads(lines[-1])
        except json.JSONDecodeError as error:
            raise Failure(f"coldrise {words[0]}: its last line is no JSON: {lines[-1][:200]}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    def call_timed(self, *words: object) -> float:
        """Wall time of a command from process start to end, in seconds."""
        return timed(self.command(*words), env=self.env)

    def init(self, *, chunk_size: str | None = None, compression: str | None = None) -> None:
        words: list[object] = ["init"]
        if chunk_size:
            words += ["--chunk-size", chunk_size]
        if compression:
            words += ["--compression", compression]
        self.call(*words)

    def publish(self, machine: str, session: str) -> float:
        return self.call_timed("publish", f"{machine}/latest", "--name", session)

    def discard(self, session: str) -> None:
        self.call("unpublish", session, "--discard")

    def serve(self, socket_path: Path, cache: str | None = None) -> Server:
        words: list[object] = [self.program, "serve", "nbd", "--socket", socket_path]
        if cache is not None:
            words += ["--cache", cache]
        return Server(words, socket_path, env=self.env, wait_for_line="ready")

    def preread(self) -> None:
        """Reads the repository's files into the page cache."""
        preread(self.repository)

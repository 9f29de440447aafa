"""Logins to a guest."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.e2e import host
from tests.e2e.platform import Json, address

MIRROR_PORT = 7007
MIRROR = (
    "nohup python3 -c $'import socket\\n"
    "s = socket.socket(type=socket.SOCK_DGRAM)\\n"
    f's.bind(("", {MIRROR_PORT}))\\n'
    "while True: data, sender = s.recvfrom(9000); s.sendto(data[::-1], sender)' >&/dev/null & "
    f"until grep -q ':{MIRROR_PORT:X} ' /proc/net/udp; do sleep 1; done"
)
"""A command in a guest with bash and Python. When it exits, each datagram is answered, reversed."""


class Login:
    """Commands in a guest, over ssh with a key from its seed."""

    def __init__(
        self,
        folder: Path,
        user: str = "root",
        enter: Sequence[str] = (),
        key: Path | None = None,
    ) -> None:
        """Make a key in `folder`, or copy the private `key` and its public one to there.

        `enter` are words before each command, such as those of `nsenter`.
        """
        self._key = folder / "key"
        self._ssh = (*enter, "ssh")
        self._user = user
        self._options = [
            *("-i", str(self._key)),
            *("-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={os.devnull}"),
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "LogLevel=ERROR"),
            # a guest whose address answers is ready; its sshd may start a moment later
            *("-o", "ConnectionAttempts=15"),
        ]
        if key is None:
            host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._key))
            return
        host.run("install", "-m", "600", str(key), str(self._key))
        host.run("install", "-m", "644", f"{key}.pub", self.public_key)

    @property
    def public_key(self) -> str:
        """The file for `--ssh-key`."""
        return f"{self._key}.pub"

    def __call__(self, view: Json, command: str, user: str = "") -> str:
        """Return the output of a command, as `user` or the one of this object."""
        return host.run(*self._argv(view, command, user))

    def give(self, view: Json, data: bytes, path: str) -> None:
        """Write a program to a path of the guest."""
        command = f"cat > {path} && chmod +x {path}"
        subprocess.run(self._argv(view, command), input=data, check=True, timeout=60)

    def start(self, view: Json, command: str) -> "subprocess.Popen[str]":
        """Start a command whose output is read while it runs."""
        argv, pipe = self._argv(view, command), subprocess.PIPE
        return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=pipe, text=True)

    def _argv(self, view: Json, command: str, user: str = "") -> list[str]:
        return [*self._ssh, *self._options, f"{user or self._user}@{address(view)}", command]

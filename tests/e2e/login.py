"""Logging in to a guest."""

import os
from pathlib import Path

from tests.e2e import host
from tests.e2e.platform import Json, address


class Login:
    """Commands in a guest, over ssh with a key that its seed names."""

    def __init__(self, folder: Path, user: str = "root") -> None:
        self._key = folder / "key"
        self._user = user
        self._options = [
            *("-i", str(self._key)),
            *("-o", "StrictHostKeyChecking=no", "-o", f"UserKnownHostsFile={os.devnull}"),
            *("-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "-o", "LogLevel=ERROR"),
            # a guest whose address answers is ready; its sshd may be a moment behind
            *("-o", "ConnectionAttempts=15"),
        ]
        host.run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._key))

    @property
    def public_key(self) -> str:
        """The file to name in `--ssh-key`."""
        return f"{self._key}.pub"

    def __call__(self, view: Json, command: str) -> str:
        return host.run("ssh", *self._options, f"{self._user}@{address(view)}", command)

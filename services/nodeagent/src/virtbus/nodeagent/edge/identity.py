"""Reads a host's identity, and stores the ids of its agent's last instances.

<state_dir>/agent/host-key  random key, made once; only its digest is sent
<state_dir>/agent/lives     ids of the agent's last instances, one per line
<run_dir>/instance          `held <id>`, or `refused` and a reason, for imaged, netd and `doctor`
"""

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path

from virtbus.bus.client.local_agent import FILE
from virtbus.nodeagent.core.instance import Me
from virtbus.nodeagent.edge.atomic_file import replace
from virtbus.schemas.hosts import HostMarks

MACHINE_ID = Path("/etc/machine-id")
HARDWARE = Path("/sys/class/dmi/id/product_uuid")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
LIVES_KEPT = 32


class HostIdentity:
    """Implements `instance.Lives`. This process must hold the lock of the state folder."""

    def __init__(self, state_dir: Path, run_dir: Path, boot_id: str = "") -> None:
        self._agent = state_dir / "agent"
        self._run = run_dir
        self._boot = boot_id or _text(BOOT_ID)

    def me(self, uuid: Callable[[], str]) -> Me:
        lock = (self._agent / "lock").stat()
        marks = HostMarks(
            key=_digest(self._key(uuid)),
            machine=_digest(_text(MACHINE_ID)),
            hardware=_digest(_text(HARDWARE)),
        )
        folder = f"{lock.st_dev}:{lock.st_ino}"
        return Me(uuid(), marks, _digest(self._boot), folder, frozenset(self._lives()))

    def _key(self, uuid: Callable[[], str]) -> str:
        path = self._agent / "host-key"
        if not (kept := _text(path)):
            kept = uuid()
            replace(path, f"{kept}\n".encode())
        return kept

    def _lives(self) -> list[str]:
        return _text(self._agent / "lives").split()

    def remember(self, instance: str) -> None:
        lives = [*self._lives(), instance][-LIVES_KEPT:]
        replace(self._agent / "lives", "".join(f"{one}\n" for one in lives).encode())

    def disown(self) -> None:
        replace(self._agent / "lives", b"")

    def tell(self, instance: str, why: str) -> None:
        text = f"held {instance}\n" if instance else f"refused\n{why}\n"
        path = self._run / FILE
        with contextlib.suppress(OSError):  # full disk: services wait for the file
            part = path.with_name(f".{path.name}.part")
            part.write_text(text)
            part.chmod(0o644)
            part.replace(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _digest(text: str) -> str:
    """Return a digest of 32 hex digits. An empty text (unknown) has an empty digest."""
    return hashlib.sha256(f"virtbus {text}".encode()).hexdigest()[:32] if text else ""

"""A guest in plain QEMU, without virtbus: its disk, its seed, its console, its power button."""

from __future__ import annotations

import io
import json
import os
import select
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import pycdlib


def write_seed(path: Path, parts: dict[str, str], label: str = "cidata", folder: str = "") -> Path:
    """Write a seed: an ISO with the label, holding the files; `folder` is such as `/a/b`."""
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, vol_ident=label, rock_ridge="1.09", joliet=3)
    depth = folder.count("/")
    for level in range(1, depth + 1):
        joliet = "/".join(folder.split("/")[: level + 1])
        iso.add_directory("/D" * level, rr_name=joliet.rpartition("/")[2], joliet_path=joliet)
    for number, (name, text) in enumerate(parts.items()):
        data = text.encode()
        iso.add_fp(
            io.BytesIO(data),
            len(data),
            f"{'/D' * depth}/PART{number}.;1",
            rr_name=name,
            joliet_path=f"{folder}/{name}",
        )
    iso.write(str(path))
    iso.close()
    return path


def overlay(image: Path, path: Path, size: str = "1G") -> Path:
    """Make a writable disk over the image, larger than it, as the product does."""
    command = [
        "qemu-img",
        "create",
        "-q",
        "-f",
        "qcow2",
        "-F",
        "qcow2",
        "-b",
        str(image),
        str(path),
        size,
    ]
    subprocess.run(command, check=True, timeout=30)
    return path


class Guest:
    """A QEMU process with its console and QMP, gone when the `with` block is left."""

    def __init__(
        self,
        folder: Path,
        disk: Path,
        *extra: str,
        machine: str = "q35",
        cpu: str = "qemu64",
        mib: int = 128,
    ) -> None:
        self.output = b""
        self._qmp_path = folder / "qmp"
        self._qmp_path.unlink(missing_ok=True)
        # fmt: off
        self._command = [
            "qemu-system-x86_64", "-machine", f"{machine},accel=tcg", "-cpu", cpu,
            "-m", str(mib), "-smp", "1",
            "-nodefaults", "-display", "none", "-serial", "stdio",
            "-qmp", f"unix:{self._qmp_path},server=on,wait=off",
            "-drive", f"file={disk},if=virtio,format=qcow2", "-device", "virtio-rng-pci", *extra,
        ]
        # fmt: on

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)

    def wait_for(self, text: str, seconds: float, since: int = 0) -> str:
        """Return the console's output from byte `since` once it holds `text`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + seconds
        while text.encode() not in self.output[since:]:
            left = deadline - time.monotonic()
            ready = select.select([self._process.stdout], [], [], max(left, 0))[0]
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            if not chunk:
                raise AssertionError(
                    f"no {text!r} on the console within {seconds} s:\n"
                    + self.output.decode(errors="replace")
                )
            self.output += chunk
        return self.output[since:].decode(errors="replace")

    def run(self, command: str, seconds: float = 20) -> str:
        """Run a command in the shell on the console and return what it printed."""
        assert self._process.stdin is not None
        self.wait_for("login:", seconds)
        since = len(self.output)
        # The quotes keep the echo of the typed line from looking like the answer.
        self._process.stdin.write(f"echo 'BEG''IN'; {command}; echo 'EN''D'\n".encode())
        self._process.stdin.flush()
        answer = self.wait_for("END\r\n", seconds, since)
        return answer.split("BEGIN\r\n", 1)[1].rsplit("END\r\n", 1)[0].replace("\r\n", "\n")

    def power_button(self) -> None:
        """Press it."""
        with socket.socket(socket.AF_UNIX) as qmp:
            qmp.settimeout(10)
            qmp.connect(str(self._qmp_path))
            answers = qmp.makefile("r")
            answers.readline()
            for name in ("qmp_capabilities", "system_powerdown"):
                qmp.sendall(json.dumps({"execute": name}).encode())
                while "return" not in json.loads(answers.readline()):
                    pass

    def wait_off(self, seconds: float) -> int:
        """Wait for the guest to switch itself off; return QEMU's exit code."""
        return self._process.wait(timeout=seconds)


def disk_seed(path: Path) -> tuple[str, ...]:
    return ("-drive", f"file={path},if=virtio,format=raw,readonly=on")

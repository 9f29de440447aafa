"""Runs QEMU's programs in the sandbox, from one open file to another (ADR 0041)."""

import asyncio
import contextlib
import os
import signal
import stat
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from virtbus.imaged.core.archive import printable
from virtbus.imaged.edge import sandbox

COMMAND = ("/usr/bin/qemu-img",)
WALL_PER_CPU = 4
_ADDRESS_BYTES = 1024**3
"""Limit of address space. qemu-img needs 140 MiB, and 1 MiB for each I/O request that waits."""
LOOK_S = 0.1
"""Interval of checks for free space and progress."""
_MAX_STDERR_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Files:
    """Descriptors of open files: one to read, one to write, and more to read."""

    source: int
    target: int
    more: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a program: its exit code, or minus the signal that ended it, and its stderr."""

    code: int
    stderr: str

    @property
    def why(self) -> str:
        return printable(self.stderr)

    @property
    def is_unavailable(self) -> bool:
        return self.code == sandbox.UNAVAILABLE

    @property
    def is_over_cpu(self) -> bool:
        return self.code in {-signal.SIGXCPU, -signal.SIGKILL}

    @property
    def is_disk_full(self) -> bool:
        return "No space left" in self.stderr


def name_of(descriptor: int) -> str:
    """Return the name of an open file for qemu-img."""
    return f"/proc/self/fd/{descriptor}"


async def convert(
    files: Files,
    limits: tuple[int, int],
    arguments: Sequence[str],
    look: Callable[[], Awaitable[None]],
    command: tuple[str, ...] = COMMAND,
) -> Ended:
    """Run `convert -q` with `arguments`, then return how it ended.

    `limits` are the maximum size of the target in bytes, and the maximum CPU time in seconds.
    `look` is called meanwhile, and may raise to end qemu-img. After a cancellation qemu-img has
    ended.

    Raises:
        TimeoutError: qemu-img ran longer than `WALL_PER_CPU` times its limit of CPU time.
    """
    async with sandboxed(files, limits, (*command, "convert", "-q", *arguments)) as process:
        async with asyncio.timeout(WALL_PER_CPU * limits[1]):
            while process.returncode is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), LOOK_S)
                await look()
    return await end_of(process)


@contextlib.asynccontextmanager
async def sandboxed(
    files: Files,
    limits: tuple[int, int],
    program: Sequence[str],
    pipes: int = asyncio.subprocess.DEVNULL,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program in the sandbox; the program has ended when the context is left.

    `limits` are as in `convert`. `pipes` are the program's stdin and stdout, as in
    `asyncio.subprocess`.
    """
    file_bytes, cpu_s = limits
    # All users may read the file of an image or layer, so the sandbox's user need not own it.
    readable = os.fstat(files.source).st_mode & stat.S_IROTH
    with contextlib.nullcontext() if readable else _lent(files.source), _lent(files.target):
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(Path(sandbox.__file__)),
            *map(str, (os.getpid(), files.source, files.target)),
            *map(str, (_ADDRESS_BYTES, file_bytes, cpu_s, *files.more)),
            "--", *program,
            stdin=pipes,
            stdout=pipes,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(files.source, files.target, *files.more),
            cwd="/",
            env={},
        )  # fmt: skip
        try:
            yield process
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()


async def end_of(process: asyncio.subprocess.Process) -> Ended:
    """Return how a program ended, with the first bytes of its stderr."""
    stderr = await process.stderr.read(_MAX_STDERR_BYTES) if process.stderr else b""
    return Ended(await process.wait(), stderr.decode(errors="replace").strip())


@contextlib.contextmanager
def _lent(descriptor: int) -> Iterator[None]:
    """Give a file to the sandbox's user while the context is open, if imaged is root."""
    if os.geteuid() != 0:
        yield
        return
    os.fchown(descriptor, sandbox.NOBODY, sandbox.NOBODY)
    try:
        yield
    finally:
        os.fchown(descriptor, 0, 0)

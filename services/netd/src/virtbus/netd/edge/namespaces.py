"""Makes, enters and removes network namespaces in threads of this process, without forks.

A named namespace is a bind mount of its nsfs file on a file in one folder, as for `ip netns`.
"""

import _thread
import asyncio
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_SHARED = 0x1000, 0x4000, 1 << 20
_MNT_DETACH = 2
OWN_NAMESPACE = "/proc/thread-self/ns/net"
"""The network namespace of the calling thread."""

T = TypeVar("T")
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def _mount(source: str, target: str, flags: int) -> None:
    _call("mount", source.encode(), target.encode(), b"none", ctypes.c_ulong(flags), None)


async def in_thread(work: Callable[[], T], on_cancel: Callable[[], None] | None = None) -> T:
    """Run blocking `work` in a new thread that starts in this process' namespace.

    Threads are not reused, because `work` may leave its thread in another namespace. A cancelled
    call runs `on_cancel`, and waits until `work` ends. Therefore two calls that a caller makes in
    sequence never work on a VM at once.

    Return the result of `work`, or raise its exception.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def body() -> None:
        try:
            settle = partial(done.set_result, work())
        except BaseException as error:  # noqa: BLE001  # raised in the awaiting task
            settle = partial(done.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: the process ends
            loop.call_soon_threadsafe(settle)

    _thread.start_new_thread(body, ())  # `threading.Thread` would take twice the CPU time
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        if on_cancel is not None:
            on_cancel()
        while not done.done():
            with suppress(asyncio.CancelledError):  # of a further cancel
                await asyncio.wait([done])
        raise


class Namespaces:
    """The directory of named namespaces (`/run/netns`)."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def path(self, name: str) -> Path:
        return self._directory / name

    def prepare(self) -> None:
        """Make the directory a shared mount, so that its mounts reach other mount namespaces."""
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            self._directory.chmod(0o755)  # despite the umask: other users list the folder
        target = str(self._directory)
        try:
            _mount("", target, _MS_SHARED | _MS_REC)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _mount(target, target, _MS_BIND | _MS_REC)
            _mount("", target, _MS_SHARED | _MS_REC)

    def names(self) -> list[str]:
        """Include names whose mount is gone."""
        return [path.name for path in self._directory.iterdir()] if self._directory.is_dir() else []

    def exists(self, name: str) -> bool:
        """Return True if `name` is a mounted namespace.

        After a crash, `name` may be a plain file.
        """
        with suppress(FileNotFoundError):
            return self.path(name).stat().st_dev == Path(OWN_NAMESPACE).stat().st_dev
        return False

    def make_and_enter(self, name: str) -> None:
        """Move the calling thread into a new namespace called `name`, for good.

        Raises:
            FileExistsError: `name` is taken.
        """
        with self._new_file(name) as target:
            _call("unshare", _CLONE_NEWNET)
            _mount(OWN_NAMESPACE, target, _MS_BIND)

    def put_back(self, name: str, fd: int) -> None:
        """Mount the namespace of `fd` under `name` again, and close `fd`."""
        try:
            self.remove(name)  # `name` may be a file that is no longer a mount
            with self._new_file(name) as target:
                _mount(f"/proc/thread-self/fd/{fd}", target, _MS_BIND)
        finally:
            os.close(fd)

    @contextmanager
    def _new_file(self, name: str) -> Iterator[str]:
        target = self.path(name)
        os.close(os.open(target, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o444))
        try:
            yield str(target)
        except OSError:
            target.unlink(missing_ok=True)
            raise

    def enter(self, name: str) -> None:
        """Move the calling thread into the namespace `name`, for good."""
        with opened(self.path(name)) as fd:
            _call("setns", fd, _CLONE_NEWNET)

    def remove(self, name: str) -> None:
        """Remove the name, if it exists.

        The kernel frees the namespace once no process holds it open.
        """
        target = self.path(name)
        try:
            _call("umount2", str(target).encode(), _MNT_DETACH)
        except OSError as error:
            if error.errno not in {errno.EINVAL, errno.ENOENT}:
                raise
        target.unlink(missing_ok=True)


@contextmanager
def opened(path: Path | str) -> Iterator[int]:
    """Hold a read-only descriptor of `path` open."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def entered(namespace: int, back: int) -> Iterator[None]:
    """Move the calling thread into a namespace, and into `back` afterwards."""
    _call("setns", namespace, _CLONE_NEWNET)
    try:
        yield
    finally:
        _call("setns", back, _CLONE_NEWNET)


def write_sysctl(key: str, value: str) -> bool:
    """Set `/proc/sys/<key>` of the thread's namespace; return False if the key is missing."""
    try:
        fd = os.open(f"/proc/sys/{key}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)
    return True


def read_sysctl(key: str) -> str:
    """Return the value of `/proc/sys/<key>` in the thread's namespace."""
    with opened(f"/proc/sys/{key}") as fd:
        return os.read(fd, 4096).decode().strip()

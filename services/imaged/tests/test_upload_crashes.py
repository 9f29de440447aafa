"""imaged dies at each write of an upload: nothing partial is seen, and the upload continues."""

import contextlib
import errno
import gzip
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from services.imaged.tests.site_under_test import NodeMaker, qcow2_image
from services.imaged.tests.upload_client import KIB, Client, receiving

from virtbus.imaged import uploads as module
from virtbus.imaged.edge.disk_threads import DiskThreads
from virtbus.schemas.errors import VirtbusError
from virtbus.schemas.image import parse_image_ref

IMAGE = qcow2_image(payload=64 * KIB)
WRITES = ("pwrite", "ftruncate", "fdatasync", "fsync", "fchmod", "rename", "unlink")
MOST = 200


NEED_SPACE = ("pwrite", "write", "fdatasync", "fsync", "rename", "link", "mkdir")


class Death:
    """Ends a process at its n-th write: this one and all later ones do nothing.

    With ENOSPC only this one fails: the disk was full for a moment, or lied about its free space.
    """

    def __init__(self, last: int, code: int = errno.EIO) -> None:
        self.left = last
        self._code = code
        self._full = code == errno.ENOSPC

    @contextlib.contextmanager
    def reigning(self) -> Iterator[None]:
        calls = NEED_SPACE if self._full else WRITES
        real = {name: getattr(os, name) for name in (*calls, "open")}
        mortal = {name: self._mortal(real[name]) for name in calls}
        try:
            for name, call in (mortal | {"open": self._opening(real["open"])}).items():
                setattr(os, name, call)
            yield
        finally:
            for name, call in real.items():
                setattr(os, name, call)

    def _dies(self) -> bool:
        self.left -= 1
        return self.left == -1 if self._full else self.left < 0

    def _mortal(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **more: Any) -> Any:
            if self._dies():
                raise OSError(self._code, os.strerror(self._code))
            return call(*args, **more)

        return write

    def _opening(self, call: Callable[..., int]) -> Callable[..., int]:
        def opened(path: Any, flags: int, *args: Any, **more: Any) -> int:
            if flags & os.O_CREAT and self._dies():
                raise OSError(self._code, os.strerror(self._code))
            return call(path, flags, *args, **more)

        return opened


@contextlib.contextmanager
def dying(death: Death) -> Iterator[None]:
    """Run the body in a process that dies; its errors end nothing else."""
    try:
        with death.reigning():
            yield
    except* (VirtbusError, OSError):
        pass


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "compressed"])
async def test_a_crash_at_any_write_leaves_nothing_partial_and_the_upload_continues(
    make_node: NodeMaker,
    threads: DiskThreads,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pack: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr(module, "STEP_BYTES", 96 * KIB)
    data = pack(IMAGE)
    for last in range(MOST):
        state, death = tmp_path / f"state-{last}", Death(last)
        async with make_node(state=state) as node:
            with death.reigning():
                async with receiving(node, threads) as uploads:
                    with contextlib.suppress(VirtbusError):
                        await Client(uploads, data, piece_bytes=96 * KIB).send()
        async with make_node(state=state) as node, receiving(node, threads) as uploads:
            for path in (state / "images/data").iterdir():
                assert path.read_bytes() == IMAGE, f"partial after {last} writes"
            image = await Client(uploads, data, piece_bytes=96 * KIB).send()
            assert image is not None
            cached = node.images.cached(parse_image_ref("mine/1"))
            assert cached is not None
            assert node.store.path(cached.digest).read_bytes() == IMAGE
        async with make_node(state=state) as node:
            assert node.images.cached(parse_image_ref("mine/1")) is not None
            assert (len(node.data()), node.parts()) == (1, []), f"left after {last} writes"
        if death.left >= 0:
            return  # it wrote no more than that
    pytest.fail(f"more than {MOST} writes")

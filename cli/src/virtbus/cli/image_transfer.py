"""Sends a local file to imaged on nodes, and continues after each interruption (ADR 0047)."""

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from virtbus.bus.client.ports import Bus
from virtbus.bus.errors import BusError, UnavailableError
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image import ImageInfo
from virtbus.schemas.image_upload import PIECE_BYTES, UploadedImage, UploadImage
from virtbus.schemas.wire import validate

PATIENCE_S = 60.0
"""An upload fails after this time without a new byte. A restart of imaged takes less time."""
PIECE_S = 10.0
"""Time limit of the first answer and of the answer to each piece. A killed imaged never answers."""
ANSWER_S = 30.0
"""Time limit of the answer to later requests without a piece. imaged's checks may take 20 s."""
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class LocalImage:
    """A local file, with its digest and size at the time of reading."""

    path: Path
    name: str
    digest: str
    size_bytes: int


async def send_to(
    bus: Bus, nodes: Sequence[str], image: LocalImage, moved: Callable[[str, int], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Upload an image to each node in turn; return images and errors by node.

    `moved` gets a node and the number of bytes that the node has.
    """
    images: dict[str, Any] = {}
    errors: dict[str, str] = {}
    with image.path.open("rb", buffering=0) as file:
        for node in nodes:
            upload = _Upload(bus, node, image, file.fileno(), partial(moved, node))
            try:
                images[node] = (await upload.run()).model_dump(mode="json")
            except VirtbusError as error:
                errors[node] = str(error)
            except BusError as error:
                errors[node] = f"imaged does not answer, or is older than this command: {error}"
    return images, errors


class _Upload:
    def __init__(
        self, bus: Bus, node: str, image: LocalImage, file: int, moved: Callable[[int], None]
    ) -> None:
        self._bus = bus
        self._subject = subjects.rpc(node, "imaged", "upload")
        self._image = image
        self._file = file
        self._moved = moved
        self._stored = -1
        """Number of bytes that the node has; -1 before the node's first answer."""
        self._next = 0

    async def run(self) -> ImageInfo:
        """Return the image once the node has it.

        Raises:
            VirtbusError: imaged refused the upload permanently, or temporarily for PATIENCE_S.
            VirtbusError: 409 `file_changed`: the file became shorter during the upload.
            BusError: no first answer within PIECE_S, or no new byte for PATIENCE_S.
        """
        clock = asyncio.get_running_loop().time
        best, end_s = -1, clock() + PIECE_S
        while True:
            failure: VirtbusError | BusError = UnavailableError("it stores no more bytes")
            pause_s = 0.0
            try:
                image = await self._attempt()
                if image is not None:
                    return image
            except (VirtbusError, BusError) as error:
                failure, pause_s = error, _pause_s(error)
            if self._stored > best or _is_checking(failure):
                best, end_s = max(best, self._stored), clock() + PATIENCE_S
            elif clock() > end_s:
                raise failure
            await asyncio.sleep(pause_s)

    async def _attempt(self) -> ImageInfo | None:
        """Send the missing bytes and return the image; None after the loss of a piece."""
        size_bytes = self._image.size_bytes
        state = await self._ask(0)
        if state.image is not None:
            return state.image
        self._stored = self._next = state.offset_bytes
        if self._stored < size_bytes:
            await self._send(max(1, state.window_bytes // PIECE_BYTES))
        return (await self._ask(size_bytes)).image if self._stored >= size_bytes else None

    async def _send(self, pieces: int) -> None:
        """Send the rest of the file, with up to `pieces` unanswered pieces at a time."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(pieces):
                    group.create_task(self._send_pieces())
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _send_pieces(self) -> None:
        size_bytes = self._image.size_bytes
        while self._next < size_bytes:
            at = self._next
            data = os.pread(self._file, min(PIECE_BYTES, size_bytes - at), at)
            if not data:
                raise _changed(self._image)
            self._next = at + len(data)
            answer = await self._ask(at, data)
            self._stored = max(self._stored, answer.offset_bytes)
            if answer.offset_bytes < at + len(data):
                self._next = size_bytes  # an earlier piece was lost, so the other tasks end, too
                return
            self._next = max(self._next, answer.offset_bytes)  # another client can be ahead
            self._moved(self._stored)

    async def _ask(self, at: int, data: bytes = b"") -> UploadedImage:
        image = self._image
        want = UploadImage(
            name=image.name, digest=image.digest, size_bytes=image.size_bytes, at=at, data=data
        )
        timeout_s = PIECE_S if data or self._stored < 0 else ANSWER_S
        return validate(
            UploadedImage, await self._bus.request(self._subject, want, timeout_s=timeout_s)
        )


def _pause_s(error: VirtbusError | BusError) -> float:
    """Return the time before the next attempt. Raise an error that a retry cannot change."""
    if isinstance(error, VirtbusError):
        if error.body.after_ms is None and error.code != Code.DEADLINE:
            raise error
        return (error.body.after_ms or 0) / 1000 or _PAUSE_S
    return _PAUSE_S


def _is_checking(error: VirtbusError | BusError) -> bool:
    return isinstance(error, VirtbusError) and error.reason == "upload_checking"


def _changed(image: LocalImage) -> VirtbusError:
    return VirtbusError(
        Code.CONFLICT,
        "file_changed",
        f"{image.path} became shorter while it was uploaded; let its writer end, then upload it",
    )

"""Copies the exported file of a volume to a move's target, and later removes it there (ADR 0063).

Nodes have no access to each other. Therefore the controller reads a stream of the source node, and
uploads the bytes to the target node.
"""

import asyncio

from virtbus.bus.client.ports import Bus
from virtbus.bus.client.streams import opening
from virtbus.bus.errors import ConflictError
from virtbus.controller.core import volume_moves
from virtbus.controller.core.fleet import Fleet
from virtbus.schemas import subjects
from virtbus.schemas.errors import Code, VirtbusError
from virtbus.schemas.image_upload import PIECE_BYTES, UploadedImage, UploadImage
from virtbus.schemas.node_rpc import ForgetImage
from virtbus.schemas.operation import ExportResult
from virtbus.schemas.streams import ExportRead
from virtbus.schemas.volume import VolumeMove, VolumeRecord
from virtbus.schemas.wire import validate

ASK_S = 5.0
ANSWER_S = 30.0
"""Time limit of an answer to an upload. imaged may need 20 s to check a complete file."""
CARRIED_AT_ONCE = 2
"""Limit of files that this controller copies at once. Each needs 0.5 MiB of memory."""


class MovedFiles:
    """Copies and removes the files of moves."""

    def __init__(self, bus: Bus, fleet: Fleet) -> None:
        self._bus = bus
        self._fleet = fleet
        self._carriers = asyncio.Semaphore(CARRIED_AT_ONCE)

    async def carry(self, record: VolumeRecord, move: VolumeMove, file: ExportResult) -> None:
        """Copy the file to the target; continue after the bytes that the target has stored."""
        name = volume_moves.image_name(record, move)
        first = UploadImage(name=name, digest=file.digest, size_bytes=file.size_bytes)
        async with self._carriers:
            answer = await self._upload(move.target, first)
            if answer.image is None and answer.offset_bytes < file.size_bytes:
                await self._stream(record, move, first, answer.offset_bytes)
            if answer.image is None:
                whole = first.model_copy(update={"at": file.size_bytes})
                answer = await self._upload(move.target, whole)
            if answer.image is None:
                message = f"{move.target} has not stored all bytes"
                raise VirtbusError(Code.UNAVAILABLE, "upload_open", message, after_ms=500)

    async def _stream(
        self, record: VolumeRecord, move: VolumeMove, upload: UploadImage, at: int
    ) -> None:
        """Send the bytes from `at` on; wait for the target's answer after each piece."""
        subject = subjects.rpc(move.source, "agent", "export")
        want = ExportRead(uid=move.export, offset=at, owner="volume move")
        async with opening(self._bus, subject, want) as stream:
            while data := await stream.read():
                for start in range(0, len(data), PIECE_BYTES):
                    piece = data[start : start + PIECE_BYTES]
                    sent = upload.model_copy(update={"at": at, "data": piece})
                    at += len(piece)
                    if (await self._upload(move.target, sent)).offset_bytes < at:
                        return  # the target lost bytes: the next attempt asks where to continue
                await self._refuse_given_up(record, move)

    async def _refuse_given_up(self, record: VolumeRecord, move: VolumeMove) -> None:
        known = self._fleet.volumes.get(record.namespace, record.name)
        if known is None or known.record.deleting or known.record.move != move:
            msg = f"the move of {record.name} has ended"
            raise ConflictError(msg)

    async def _upload(self, node: str, want: UploadImage) -> UploadedImage:
        subject = subjects.rpc(node, "imaged", "upload")
        answer = await self._bus.request(subject, want, timeout_s=ANSWER_S)
        return validate(UploadedImage, answer)

    async def drop(self, record: VolumeRecord, move: VolumeMove) -> None:
        """Remove the uploaded file from the target; do nothing if the target is forgotten."""
        if move.source == move.target or not self._fleet.has_node(move.target):
            return
        subject = subjects.rpc(move.target, "imaged", "delete")
        ask = ForgetImage(ref=volume_moves.image_name(record, move))
        try:
            await self._bus.request(subject, ask, timeout_s=ASK_S)
        except VirtbusError as error:
            if error.code != Code.NOT_FOUND:
                raise

"""Reads core messages one by one, and skips invalid messages."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from pydantic import BaseModel

from virtbus.bus.client.codec import read_message
from virtbus.bus.client.ports import Message
from virtbus.schemas.errors import VirtbusError

Model = TypeVar("Model", bound=BaseModel)
log = logging.getLogger(__name__)


async def hear(
    messages: AsyncIterator[Message],
    model: type[Model] | Callable[[str], type[Model]],
    take: Callable[[Model], None],
) -> None:
    """Pass the data of each message to `take`, until `messages` ends.

    `model` is the data's model, or a function that returns the model for a subject. A message that
    is invalid or makes `take` fail is skipped, so a publisher cannot end the reader. Of the skipped
    messages, the 1st, 2nd, 4th, 8th … are logged.
    """
    bad = 0
    async for message in messages:
        await asyncio.sleep(0)  # other tasks run between two messages of a flood
        try:
            kind = model if isinstance(model, type) else model(message.subject)
            take(read_message(kind, message))
        except Exception as error:
            bad += 1
            if bad & (bad - 1) == 0:
                log.warning(
                    "message on %s skipped, %d so far: %s",
                    message.subject,
                    bad,
                    str(error)[:500] or type(error).__name__,
                    exc_info=None if isinstance(error, ValueError | VirtbusError) else error,
                    extra={"code": "bad_event"},
                )

"""Reads core messages one by one; an invalid message or a failing handler ends nothing."""

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
    """Pass the data of every message to `take`, for as long as messages arrive.

    `model` is the data's model, or returns it for a subject. A message that is invalid, or that
    `take` fails on, is logged and skipped: a publisher must not be able to end the reader.
    """
    bad = 0
    async for message in messages:
        await asyncio.sleep(0)  # a flood takes one turn of the loop for each message
        try:
            kind = model if isinstance(model, type) else model(message.subject)
            take(read_message(kind, message))
        except Exception as error:
            bad += 1
            if bad & (bad - 1) == 0:  # 1, 2, 4, 8 …: keeps the log short
                log.warning(
                    "message on %s skipped, %d so far: %s",
                    message.subject,
                    bad,
                    str(error)[:500] or type(error).__name__,
                    exc_info=None if isinstance(error, ValueError | VirtbusError) else error,
                    extra={"code": "bad_event"},
                )

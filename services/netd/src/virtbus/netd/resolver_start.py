"""Starts, finds and ends the resolver's process, with time limits against a hung process."""

import asyncio
import logging
from typing import NamedTuple

from virtbus.netd.core.resolver_messages import Message, ResolverSite
from virtbus.netd.edge.namespaces import in_thread
from virtbus.netd.edge.resolver_channel import ResolverChannel
from virtbus.netd.edge.resolver_launch import found_at, kill_at, launch

log = logging.getLogger(__name__)

HELLO_S = 60.0
"""The time limit of a start and of an answer. On a busy host, a start takes many seconds."""
END_S = 10.0


class PortTakenError(Exception):
    """Another server has the port."""


class FoundResolver(NamedTuple):
    """A running process."""

    channel: ResolverChannel
    site: str
    """The text of the process's `ResolverSite`."""


async def found(site: ResolverSite) -> FoundResolver | None:
    """Return the process behind the site's socket, or None. Kill a hung process."""
    channel = await found_at(site.socket)
    if channel is None:
        return None
    try:
        greeting = await _next(channel, HELLO_S)
    except TimeoutError:
        channel.close()
        await end_hung(site)
        return None
    return _greeted(channel, greeting)


async def launched(site: ResolverSite) -> ResolverChannel | None:
    """Return the channel to a new process; None after a logged error.

    The process has no port yet.
    """
    try:
        channel = await launch(site.text())
    except OSError as error:
        _failed(str(error))
        return None
    try:
        made = _greeted(channel, await _next(channel, HELLO_S))
    except BaseException as error:  # the process ends when its channel closes
        channel.close()
        if not isinstance(error, TimeoutError):
            raise
        made = None
    if made is None:
        _failed("its process ended, or did not answer")
        return None
    return made.channel


async def begun(channel: ResolverChannel, site: ResolverSite) -> bool:
    """Let a new process open the port. Return False after a logged error.

    Raises:
        PortTakenError: another server has the port.
    """
    channel.send({"begin": True})
    try:
        message = await _next(channel, HELLO_S)
    except TimeoutError:
        message = None
    if message is None or (message["begun"] and not message["taken"]):
        _failed(message["begun"] if message is not None else "its process ended, or did not answer")
        return False
    if message["taken"]:
        raise PortTakenError(
            f"port 53 of {site.gateway} cannot be opened ({message['begun']}); let the host's DNS "
            "server listen on its own addresses only, or empty the setting `zone`"
        )
    return True


async def end(channel: ResolverChannel, site: ResolverSite) -> None:
    """End a process, and wait until it has closed its ports. Kill a hung process."""
    channel.send({"end": True})
    try:
        async with asyncio.timeout(END_S):
            while await channel.receive() is not None:
                pass
    except TimeoutError:
        await end_hung(site)
    finally:
        channel.close()


async def end_hung(site: ResolverSite) -> None:
    """Kill the process behind the site's socket."""
    log.error("the resolver does not answer; it is killed", extra={"code": "resolver_hangs"})
    if not await in_thread(lambda: kill_at(site.socket)):
        log.error("the resolver cannot be killed", extra={"code": "resolver_stays"})


def _failed(why: str) -> None:
    log.error("the resolver cannot be started: %s", why, extra={"code": "resolver_start"})


async def _next(channel: ResolverChannel, timeout_s: float) -> Message | None:
    async with asyncio.timeout(timeout_s):
        return await channel.receive()


def _greeted(channel: ResolverChannel, message: Message | None) -> FoundResolver | None:
    if message is None or "hello" not in message:
        channel.close()
        return None
    return FoundResolver(channel, str(message["hello"]))

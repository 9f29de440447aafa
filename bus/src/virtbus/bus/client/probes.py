"""Checks a port, or a NATS server's greeting, login and responders, without nats-py."""

import asyncio
import errno
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


@asynccontextmanager
async def _greeted(
    host: str, port: int
) -> AsyncIterator[tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        yield await reader.readline(), reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def greets(host: str, port: int) -> bool:
    """Return True if a NATS server answers on this port."""
    try:
        async with _greeted(host, port) as (greeting, _, _):
            return greeting.startswith(b"INFO")
    except OSError:
        return False


async def logs_in(host: str, port: int, user: str, password: str) -> bool:
    """Return True if the server accepts this user and password."""
    return await _accepted(host, port, user, password)


async def is_heard(
    host: str, port: int, user: str, password: str, subject: str, inbox: str
) -> bool:
    """Return True if this user's requests on `subject` have a responder."""
    asked = f"SUB {inbox} 1\r\nPUB {subject} {inbox} 0\r\n\r\n"
    return await _accepted(host, port, user, password, asked)


async def _accepted(host: str, port: int, user: str, password: str, asked: str = "") -> bool:
    """Log in and send the commands `asked`.

    Return False if the server refuses the login, or if a command has no responder.
    """
    options = {"user": user, "pass": password, "headers": True, "no_responders": True}
    login = json.dumps({"verbose": False, "name": "check", **options})
    try:
        async with _greeted(host, port) as (_, reader, writer):
            writer.write(f"CONNECT {login}\r\n{asked}PING\r\n".encode())
            while not (line := await reader.readline()).startswith(b"PONG"):
                if not line or b" 503" in line:  # without a responder, 503 precedes PONG
                    return False
    except OSError:
        return False
    return True


def is_free(host: str, port: int) -> bool:
    """Return False if another process listens on this port.

    Raises:
        OSError: no process can listen on `host`, for example because the machine lacks the address.
    """
    with _socket(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return False
    return True


def any_port(host: str) -> int:
    """Return a port that is free now."""
    with _socket(host) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def bracketed(host: str) -> str:
    """Return a host for a URL; an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host


def _socket(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)

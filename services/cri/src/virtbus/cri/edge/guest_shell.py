"""Runs commands in guests by SSH, with the key of the guest's pod.

The host key of the guest is not checked, because the guest makes it at the first boot. The address
is safe: the node itself reports the address, and netd lets no other guest use this address.
"""

import asyncio
import logging
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

import asyncssh

from virtbus.bus.runtime.tasks import background
from virtbus.cri.core.pod import ShellKey
from virtbus.cri.core.remote_command import RESIZE, STDERR, STDIN, STDOUT, SizeReader, Wanted
from virtbus.cri.edge.pipes import Pipe
from virtbus.schemas.errors import Code, VirtbusError

PORT = 22
USER = "root"
CONNECT_S = 10.0
ALIVE_S = 15.0
WINDOW_BYTES = 64 * 1024
PIECE_BYTES = 32 * 1024
SIGNALS = {"HUP": 1, "INT": 2, "QUIT": 3, "ABRT": 6, "KILL": 9, "SEGV": 11, "PIPE": 13, "TERM": 15}
SIGNALLED = 128
"""As in a shell, a command that a signal ended has the exit code SIGNALLED plus the signal."""
KEY_TYPE = "ssh-ed25519"
KEY_EXCHANGES = ("curve25519-sha256", "ecdh-sha2-nistp256", "diffie-hellman-group14-sha256")
HOST_KEYS = ("ssh-ed25519", "ecdsa-sha2-nistp256", "rsa-sha2-512", "rsa-sha2-256")
CIPHERS = ("chacha20-poly1305@openssh.com", "aes256-ctr", "aes128-ctr")
MACS = ("hmac-sha2-256", "hmac-sha2-512")
"""The sets KEY_EXCHANGES, HOST_KEYS, CIPHERS and MACS are small, and ed25519 is the first host key.
With asyncssh's default sets, a login at a dropbear server without an RSA key fails."""
asyncssh.set_log_level(logging.WARNING)


class Outcome(NamedTuple):
    """The exit code of a command, and the first bytes of its outputs."""

    exit_code: int
    stdout: bytes
    stderr: bytes


Take = Callable[[str, bytes], Awaitable[None]]
"""Takes bytes of `stdout` or `stderr`."""


class GuestShell:
    """SSH to the guests of this node, at the guests' port `port`."""

    def __init__(self, port: int = PORT) -> None:
        self._port = port

    @staticmethod
    def new_key() -> ShellKey:
        key = asyncssh.generate_private_key(KEY_TYPE)
        public = " ".join(key.export_public_key().decode().split()[:2])
        return ShellKey(private=key.export_private_key().decode(), public=f"{public} virtbus-cri")

    async def check(self, address: str, limit_s: float) -> None:
        """Wait at most `limit_s` for the greeting of the guest's SSH server.

        Raises VirtbusError 422 `no_shell`.
        """
        try:
            async with asyncio.timeout(limit_s):
                reader, writer = await asyncio.open_connection(address, self._port)
                try:
                    banner = await reader.readexactly(4)
                finally:
                    writer.transport.abort()
        except (OSError, EOFError) as error:
            raise _no_shell(address, str(error)) from error
        if banner != b"SSH-":
            raise _no_shell(address, "another service has its port")

    async def interactive(
        self,
        address: str,
        key: ShellKey,
        words: tuple[str, ...],
        wanted: Wanted,
        pipes: Mapping[str, Pipe],
    ) -> int:
        """Run a command with the streams of a client, and return its exit code.

        Raises:
            VirtbusError: 422 `no_shell`: no SSH login is possible. 503 `shell_lost`: the guest
                ended the connection.
        """

        async def take(name: str, data: bytes) -> None:
            if (pipe := pipes.get(name)) is not None:
                await pipe.write(data)

        async with (
            self._connected(address, key) as connection,
            _running(connection, words, tty=wanted.tty) as process,
            background() as tasks,
        ):
            tasks.start(_type(process, pipes.get(STDIN)))
            tasks.start(_resize(process, pipes.get(RESIZE)))
            return await _outcome(process, take)

    async def collected(
        self, address: str, key: ShellKey, words: tuple[str, ...], most_bytes: int
    ) -> Outcome:
        """Run a command without input. Return up to `most_bytes` of each of its two outputs.

        Raises the errors of `interactive`.
        """
        kept = {STDOUT: bytearray(), STDERR: bytearray()}

        async def take(name: str, data: bytes) -> None:
            kept[name] += data[: most_bytes - len(kept[name])]

        async with (
            self._connected(address, key) as connection,
            _running(connection, words, tty=False) as process,
        ):
            process.stdin.write_eof()
            try:
                exit_code = await _outcome(process, take)
            except asyncio.CancelledError:
                with suppress(OSError):  # the command has just ended
                    process.kill()  # the command must not run on in the guest
                raise
        return Outcome(exit_code, bytes(kept[STDOUT]), bytes(kept[STDERR]))

    @asynccontextmanager
    async def _connected(
        self, address: str, key: ShellKey
    ) -> AsyncIterator[asyncssh.SSHClientConnection]:
        try:
            async with asyncio.timeout(CONNECT_S):
                connection = await asyncssh.connect(
                    address,
                    self._port,
                    username=USER,
                    client_keys=[asyncssh.import_private_key(key.private)],
                    known_hosts=None,
                    config=(),
                    agent_path=None,
                    preferred_auth="publickey",
                    keepalive_interval=ALIVE_S,
                    kex_algs=KEY_EXCHANGES,
                    server_host_key_algs=HOST_KEYS,
                    encryption_algs=CIPHERS,
                    mac_algs=MACS,
                    compression_algs=("none",),
                )
        except (OSError, asyncssh.Error) as error:
            raise _no_shell(address, str(error)) from error
        try:
            yield connection
        finally:
            connection.abort()


def _no_shell(address: str, why: str) -> VirtbusError:
    message = (
        f"exec needs an SSH server in the guest that lets {USER} log in with the pod's key, at "
        f"{address}: {why or 'no answer in time'}"
    )
    return VirtbusError(Code.UNSUPPORTED, "no_shell", message)


@asynccontextmanager
async def _running(
    connection: asyncssh.SSHClientConnection, words: tuple[str, ...], *, tty: bool
) -> AsyncIterator["asyncssh.SSHClientProcess[bytes]"]:
    try:
        process = await connection.create_process(
            shlex.join(words),
            encoding=None,
            window=WINDOW_BYTES,
            term_type="xterm" if tty else None,
            term_size=(80, 24) if tty else (),
        )
    except (OSError, asyncssh.Error) as error:
        raise _lost(error) from error
    try:
        yield process
    except asyncssh.Error as error:
        raise _lost(error) from error
    finally:
        process.close()


def _lost(error: Exception) -> VirtbusError:
    message = f"the guest ended the command's connection: {error}"
    return VirtbusError(Code.UNAVAILABLE, "shell_lost", message)


async def _outcome(process: "asyncssh.SSHClientProcess[bytes]", take: Take) -> int:
    async with asyncio.TaskGroup() as group:
        group.create_task(_copy(process.stdout, STDOUT, take))
        group.create_task(_copy(process.stderr, STDERR, take))
    await process.wait_closed()
    if process.exit_status is not None and process.exit_status >= 0:
        return process.exit_status
    if process.exit_signal is not None:
        return SIGNALLED + SIGNALS.get(process.exit_signal[0], 0)
    raise _lost(ConnectionError("it has no exit code"))


async def _copy(source: "asyncssh.SSHReader[bytes]", name: str, take: Take) -> None:
    while data := await source.read(PIECE_BYTES):
        await take(name, data)


async def _type(process: "asyncssh.SSHClientProcess[bytes]", pipe: Pipe | None) -> None:
    with suppress(OSError):  # the command has closed its input
        while pipe is not None and (data := await pipe.read()):
            process.stdin.write(data)
            await process.stdin.drain()
        process.stdin.write_eof()


async def _resize(process: "asyncssh.SSHClientProcess[bytes]", pipe: Pipe | None) -> None:
    sizes = SizeReader()
    while pipe is not None and (data := await pipe.read()):
        if (size := sizes.feed(data)) is not None:
            process.change_terminal_size(*size)

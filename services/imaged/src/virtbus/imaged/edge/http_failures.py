"""Translates aiohttp's errors into words for people."""

import os
import socket
import ssl

import aiohttp

_IN_WORDS: tuple[tuple[type[aiohttp.ClientError], str], ...] = (
    (
        aiohttp.ClientSSLError,
        "no TLS connection could be made; does the server speak https on this port?",
    ),
    (
        aiohttp.ServerDisconnectedError,
        "the server closed the connection without an answer",
    ),
    (aiohttp.ClientPayloadError, "the connection broke in the middle of the file"),
    (aiohttp.ClientResponseError, "the server's answer is no HTTP that can be read"),
)


def reason_of(error: aiohttp.ClientError) -> str:
    """Return why a request failed, without the names of Python's classes."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return f"its TLS certificate is not accepted: {_certificate(error.certificate_error)}"
    if isinstance(error, aiohttp.ClientHttpProxyError):
        return f"the proxy answers {error.status}"
    for kind, words in _IN_WORDS:
        if isinstance(error, kind):
            return words
    if isinstance(error, aiohttp.ClientConnectorError):
        return _of_connect(error)
    if isinstance(error, aiohttp.ClientOSError) and error.errno:
        return f"the connection broke: {os.strerror(error.errno).lower()}"
    return "the connection failed"


def _of_connect(error: aiohttp.ClientConnectorError) -> str:
    cause = error.os_error
    if isinstance(error, aiohttp.ClientConnectorDNSError) or isinstance(cause, socket.gaierror):
        return f"the name {error.host} cannot be resolved"
    why = f": {os.strerror(cause.errno).lower()}" if cause.errno else ""
    return f"no connection to {error.host} port {error.port}{why}"


def _certificate(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return "it does not fit the server's name"

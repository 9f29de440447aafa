"""Defines the transports of `images.d`: the ways in which imaged reaches image servers."""

import re
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, StringConstraints, model_validator

from virtbus.imaged.core.limits import TransferLimits
from virtbus.schemas.model import StrictModel

MAX_REDIRECTS = 10
_HOST = re.compile(r"^[A-Za-z0-9]([A-Za-z0-9.-]{0,252}[A-Za-z0-9])?$")


def _check_proxy(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme != "http" or not parts.hostname or not parts.port:
        msg = "must be http://host:port"
        raise ValueError(msg)
    if "@" in parts.netloc:
        msg = "must hold no user name or password; put them into proxy_login_file"
        raise ValueError(msg)
    if parts.path.strip("/") or parts.query or parts.fragment:
        msg = "must be http://host:port, without a path"
        raise ValueError(msg)
    return text


def _check_host(text: str) -> str:
    if _HOST.fullmatch(text) is None:
        msg = "must be a host name or an address, without a port"
        raise ValueError(msg)
    return text


def _check_server(text: str) -> str:
    if not text or server_of(text) != text.lower():
        msg = "must be https://host[:port], http://host[:port] or docker://host[:port]"
        raise ValueError(msg)
    return text.lower()


def server_of(url: str) -> str:
    """Return scheme, host and port of a URL in lower case; empty if the URL is not valid."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return ""
    if parts.scheme not in {"http", "https", "docker"} or not parts.hostname or "@" in parts.netloc:
        return ""
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    return f"{parts.scheme}://{host}" + (f":{port}" if port not in {None, usual} else "")


File = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A path. A relative path begins at the folder of the rules."""


class Transport(StrictModel):
    """`[transports.<name>]` of a file in `images.d`. Each field replaces a default of imaged."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    timeout_s: float | None = Field(
        None, ge=0.01, le=7 * 86_400, description="seconds after which a pull fails"
    )
    max_redirects: int | None = Field(
        None, ge=0, le=MAX_REDIRECTS, description="number of redirects that a request follows"
    )
    proxy: Annotated[str, AfterValidator(_check_proxy)] | None = Field(
        None, description="`http://host:port` of a proxy for http and https"
    )
    proxy_login_file: File | None = Field(
        None, description="file with `user:password` for the proxy"
    )
    ca_file: File | None = Field(
        None, description="PEM file of authorities to trust in addition to the system's"
    )
    client_certificate_file: File | None = Field(
        None, description="PEM file of the client's certificate, for the server of the URL only"
    )
    client_key_file: File | None = Field(
        None, description="PEM file of that certificate's key, if the key has its own file"
    )
    server_name: Annotated[str, AfterValidator(_check_host)] | None = Field(
        None, description="name in the certificate of the URL's server, in place of its host"
    )
    login_file: File | None = Field(
        None, description="file with `user:password` for the server of the URL only (Basic)"
    )

    image_name_servers: tuple[Annotated[str, AfterValidator(_check_server)], ...] = Field(
        (),
        strict=False,  # TOML has lists
        max_length=100,
        description="servers (`https://host[:port]`, `docker://host[:port]`) of which image names "
        "on the bus may use this transport, with its login and certificate; without it none",
    )

    @model_validator(mode="after")
    def _pairs(self) -> "Transport":
        for given, needs in (
            ("client_key_file", "client_certificate_file"),
            ("proxy_login_file", "proxy"),
        ):
            if getattr(self, given) is not None and getattr(self, needs) is None:
                msg = f"{given} needs {needs}"
                raise ValueError(msg)
        return self


def refusal(transport: Transport, url: str, where: str) -> str:
    """Return the reason why an image name of the bus with this URL may not use a transport.

    Return an empty text if the name may use the transport. Users choose the URL, so a transport's
    login is sent only to servers that the node's operator has named.
    """
    if url.startswith("docker://") and transport.login_file:
        return f"{where}: logins of registries are in registry_auth_file, not in login_file"
    server = server_of(url)
    if server and server in transport.image_name_servers:
        return ""
    return f"{where}: image_name_servers does not have {server or 'the server of the URL'}"


PLAIN = Transport()
"""The transport of an image whose rule names no transport."""


def limits_by(limits: TransferLimits, transport: Transport) -> TransferLimits:
    """Return the limits of a transfer, with the values that the transport replaces."""
    timeout_s, redirects = transport.timeout_s, transport.max_redirects
    return replace(
        limits,
        total_timeout_s=limits.total_timeout_s if timeout_s is None else timeout_s,
        max_redirects=limits.max_redirects if redirects is None else redirects,
    )

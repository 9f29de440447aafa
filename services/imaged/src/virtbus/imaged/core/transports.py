"""Transports of `images.d`: the way in which an image server is reached."""

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


File = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
"""A path; a relative one begins at the folder of the rules."""


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
        None, description="PEM file of its key, if it is in a file of its own"
    )
    server_name: Annotated[str, AfterValidator(_check_host)] | None = Field(
        None, description="name in the certificate of the URL's server, in place of its host"
    )
    login_file: File | None = Field(
        None, description="file with `user:password` for the server of the URL only (Basic)"
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


PLAIN = Transport()
"""The way of an image without a transport."""


def limits_by(limits: TransferLimits, transport: Transport) -> TransferLimits:
    """Return the limits of a transfer by a transport."""
    timeout_s, redirects = transport.timeout_s, transport.max_redirects
    return replace(
        limits,
        total_timeout_s=limits.total_timeout_s if timeout_s is None else timeout_s,
        max_redirects=limits.max_redirects if redirects is None else redirects,
    )

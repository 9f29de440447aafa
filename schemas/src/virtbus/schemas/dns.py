"""Defines a guest's own DNS settings: name servers and search domains (ADR 0081)."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from virtbus.schemas.model import StrictModel

NAMESERVERS_MAX, SEARCHES_MAX, SEARCH_CHARACTERS_MAX = 3, 32, 2048
"""The limits of Kubernetes. The last limit is for all search domains, joined by spaces."""
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_DOMAIN = rf"(?i:{_LABEL}(?:\.{_LABEL})*)"
_DOMAIN_MAX = 253


def is_domain(text: str) -> bool:
    """Return True for a domain name with valid characters, labels and length."""
    return len(text) <= _DOMAIN_MAX and text.isascii() and re.fullmatch(_DOMAIN, text) is not None


def _domain(text: str) -> str:
    if not is_domain(text):
        msg = "must be a domain name such as svc.cluster.local"
        raise ValueError(msg)
    return text


DomainName = Annotated[str, StringConstraints(max_length=_DOMAIN_MAX), AfterValidator(_domain)]


def _address(text: str) -> str:
    try:
        address = ip_address(text)
    except ValueError:
        address = None
    if address is None or "%" in text:
        msg = "must be an IPv4 or IPv6 address without a zone, such as 10.96.0.10"
        raise ValueError(msg)
    return str(address)


def _server(text: str) -> str:
    address = ip_address(text)
    if address.is_multicast or address.is_unspecified:
        msg = "must be the address of a server, not a multicast or unspecified one"
        raise ValueError(msg)
    return text


IpText = Annotated[str, StringConstraints(max_length=45), AfterValidator(_address)]
NameServer = Annotated[IpText, AfterValidator(_server)]


class DnsConfig(StrictModel):
    """The DNS settings of a guest, which replace those of its networks. Either field may be empty.

    DHCP gives the settings to the guest.
    """

    nameservers: tuple[NameServer, ...] = Field((), max_length=NAMESERVERS_MAX)
    searches: tuple[DomainName, ...] = Field((), max_length=SEARCHES_MAX)

    @model_validator(mode="after")
    def _within_characters(self) -> Self:
        if len(" ".join(self.searches)) > SEARCH_CHARACTERS_MAX:
            msg = f"searches must have {SEARCH_CHARACTERS_MAX} characters at most, with spaces"
            raise ValueError(msg)
        return self

    @property
    def servers4(self) -> tuple[IPv4Address, ...]:
        """Return the servers that DHCP can name."""
        return tuple(IPv4Address(one) for one in self.nameservers if ":" not in one)

    @property
    def servers6(self) -> tuple[IPv6Address, ...]:
        """Return the servers that DHCPv6 can name."""
        return tuple(IPv6Address(one) for one in self.nameservers if ":" in one)

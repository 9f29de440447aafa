"""Types of IP addresses and networks, without pydantic: some importing processes must be small."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Net = IPv4Network | IPv6Network

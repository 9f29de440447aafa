"""Types of IP addresses and networks; without pydantic, because some importers must be small."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network

Address = IPv4Address | IPv6Address
Net = IPv4Network | IPv6Network

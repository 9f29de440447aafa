"""The network of each VM on one host: namespace, attachment, tap, filter, DHCP, descriptors.

Belongs here: everything that needs network privileges. Must not enter: libvirt, images, the public
API. No other virtbus process opens a tap or a netlink socket.
"""

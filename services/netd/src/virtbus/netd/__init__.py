"""The network of each VM on one host: namespace, attachment, tap, filter, DHCP, descriptors.

All code that needs network privileges belongs here. Code for libvirt, images and the public API
must not enter. No other virtbus process opens a tap or a netlink socket.
"""

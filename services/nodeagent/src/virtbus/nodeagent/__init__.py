"""The nodeagent: turns records into libvirt domains and keeps them so.

The only one that ends a VM, and the owner of its status. Must not enter: images, networks, names.
"""

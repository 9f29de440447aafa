"""The nodeagent: turns records into libvirt domains and keeps them in the desired state.

Only this service ends VMs and writes their status. Must not enter: images, networks, names.
"""

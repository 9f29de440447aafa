"""The container runtime of a Kubernetes node: kubelet's pods as VMs of virtbus.

It serves Kubernetes' CRI on a UNIX socket and is a client of the bus. It knows no libvirt, makes no
network and reads no image.
"""

"""The container runtime of a Kubernetes node: kubelet's pods as VMs of virtbus.

virtbus-cri serves Kubernetes' CRI on a UNIX socket, and is a client of the bus. The services
nodeagent, netd and imaged do the work of libvirt, networks and images.
"""

"""The commands that make a host a Kubernetes node whose pods may be VMs.

They change files and units of this host only; they use neither the bus nor the API server.
"""

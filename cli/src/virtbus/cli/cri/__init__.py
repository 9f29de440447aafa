"""The commands that make a host a Kubernetes node whose pods may be VMs.

They change only files and units of this host, and use neither the bus nor the API server.
"""

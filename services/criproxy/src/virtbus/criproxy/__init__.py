"""The proxy of a Kubernetes node: kubelet's one runtime socket before two container runtimes.

The proxy decides which runtime a call belongs to, and merges the answers of both runtimes. It runs
no pod, has no connection to the bus, and knows nothing of VMs.
"""

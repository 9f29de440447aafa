"""The Kubernetes bridge: a client of the bus that offers KubeVirt's API to a cluster.

The bridge reads Kubernetes objects, sends requests to virtbus, and writes virtbus' answers as
status. The bridge never writes records on the bus, and never acts on a host.
"""

"""The bridge's access to Kubernetes: list and watch, writes, the served API, certificates.

It reads objects, asks `core` for actions, and executes them. KubeVirt's rules belong into `core`.
"""

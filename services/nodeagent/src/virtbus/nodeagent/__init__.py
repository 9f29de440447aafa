"""The nodeagent: makes libvirt domains from records, and keeps them in the desired state.

Only this service ends VMs and writes their status. Images, networks and names belong to other
services.
"""

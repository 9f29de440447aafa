"""The NATS client of all services, and a fake with the same contract.

This package contains connection, records, watches, services, events and trace context. Its modules
may use the names of streams and subjects. Other knowledge about VMs must not enter.
"""

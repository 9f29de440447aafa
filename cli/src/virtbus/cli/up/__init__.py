"""`virtbus up`: a bus, the controller and this host's node services on one terminal.

This package starts, watches and stops processes, and reports on them. It knows only a service's
name, environment and sd_notify messages. The work of a service does not belong here.
"""

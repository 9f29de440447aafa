"""`virtbus up`: a bus, the controller and this host's node services on one terminal.

Belongs here: starting, watching and stopping processes, and saying so. Must not enter: what a
service does; it is only known by its name, its environment and its sd_notify messages.
"""

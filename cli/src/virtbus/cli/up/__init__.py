"""`virtbus up`: a bus, the controller and this host's node services on one terminal.

Belongs here: starting, watching and stopping processes, and reporting on them. Must not enter: the
work of a service; it is known only by its name, environment and sd_notify messages.
"""

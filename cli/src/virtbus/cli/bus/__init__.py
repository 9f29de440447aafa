"""`virtbus bus VERB`: the verbs for the bus, its records and its files.

Belongs here: requests, files and output of these verbs. Must not enter: verbs for VMs and hosts.
"""

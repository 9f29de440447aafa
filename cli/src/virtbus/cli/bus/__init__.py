"""`virtbus bus VERB`: the verbs for the bus, its records and its files.

This package has the requests, files and output of these verbs. Verbs for VMs and hosts do not
belong here.
"""

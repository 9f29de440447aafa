"""`virtbus bus VERB`: the verbs about the bus itself, its records and its files.

Belongs here: what a verb asks or writes, and prints. Must not enter: verbs about VMs and hosts.
"""

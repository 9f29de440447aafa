"""`virtbus doctor`: checks this host, with one finding for each requirement of virtbus.

Belongs here: reading and probing, and the command that repairs a finding. Must not enter: any
change to the host; doctor only reads.
"""

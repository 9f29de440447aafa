"""`virtbus vm`: the verbs for virtual machines.

Belongs here: requests, waiting and output of these verbs. Must not enter: checks that the server
makes.
"""

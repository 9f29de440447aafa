"""`virtbus doctor`: one look at this host, one finding for each thing that virtbus needs.

Belongs here: reading and probing, and the line that mends what is missing. Must not enter: any
change to the host; doctor only looks.
"""

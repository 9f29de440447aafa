"""Postpones garbage collection during imports. A process imports this module before all others.

Imported objects are permanent, so a collection finds almost no garbage among them. Collections
would take 45 ms of the 570 ms that a service needs to start. A controller has 100,000 objects after
its imports. `runtime.process.run` sets the threshold of a running service.
"""

import gc

OBJECTS_OF_AN_IMPORT = 200_000
gc.set_threshold(OBJECTS_OF_AN_IMPORT)

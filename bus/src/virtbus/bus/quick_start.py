"""Makes the start of a process faster. A process imports this module before all others.

Garbage collection is postponed during imports. Imported objects are permanent, so a collection
finds almost no garbage among them. Collections would take 45 ms of the 570 ms that a service needs
to start. A controller has 100,000 objects after its imports. `runtime.process.run` sets the
threshold of a running service.

pydantic does not look for plugins, because virtbus has none. The search reads the metadata of every
installed distribution and takes 5 ms. A value of PYDANTIC_DISABLE_PLUGINS in the environment stays.
"""

import gc
import os

OBJECTS_OF_AN_IMPORT = 200_000
gc.set_threshold(OBJECTS_OF_AN_IMPORT)
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

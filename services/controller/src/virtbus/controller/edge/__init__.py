"""What the controller does: records on the bus, requests from it."""

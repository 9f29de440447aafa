"""A connection to the bus: records, watches, requests, events and streams; and a fake of it."""

"""Arrow schemas, codec, Flight channel, segment log."""

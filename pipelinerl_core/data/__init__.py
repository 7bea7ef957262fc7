"""Rows: Arrow schemas, codec, checks, segments of finished groups and the log of open ones."""

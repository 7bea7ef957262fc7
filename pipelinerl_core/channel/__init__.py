"""The hub's wire: dispatcher, admission, server, client, TLS."""

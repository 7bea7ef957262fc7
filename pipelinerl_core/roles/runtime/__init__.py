"""Parts that roles share: process, monitor, connection to the hub, engine, traces."""

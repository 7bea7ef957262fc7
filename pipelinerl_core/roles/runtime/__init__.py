"""What every role is built from: its process, monitor, link to the hub, engine, traces."""

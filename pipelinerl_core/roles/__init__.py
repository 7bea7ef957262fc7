"""One module per role: builds its parts and runs its loop."""

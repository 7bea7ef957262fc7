"""Commands on a run that is not live: audit, gc, export, prepare, replay."""

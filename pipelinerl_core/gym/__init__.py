"""Tasks of the reasoning-gym library: which are reviewed, and their options."""

"""The actor: samples rollouts on one engine, and swaps new weights in while sequences run."""

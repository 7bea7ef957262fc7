"""A user's environments: episodes of several turns, played in processes of their own."""

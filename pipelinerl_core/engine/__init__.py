"""Engines: requests in, tokens with log-probabilities and weight versions out."""

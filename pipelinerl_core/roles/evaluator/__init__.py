"""The evaluator: measures the held-out accuracy of weight versions on an engine of its own."""

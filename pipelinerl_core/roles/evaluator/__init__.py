"""The evaluator: held-out accuracy of weight versions."""

"""Pure mathematics: tensors in, tensors out."""

"""From the reserved groups of a step to tensors: rows with advantages, weights and masks; packs by token budget."""

"""Pack rollouts by token budget, collate them to tensors."""

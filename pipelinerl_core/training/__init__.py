"""Model loading, learner, optimizer, checkpoint."""

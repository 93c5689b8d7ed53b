"""Generation from a trained model."""

"""State of a model's parameters on one mesh: weights, master weights and optimizer state."""

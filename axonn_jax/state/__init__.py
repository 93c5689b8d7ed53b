"""State of a model's parameters on one mesh: weights, masters and optimizer state, in any form and place."""

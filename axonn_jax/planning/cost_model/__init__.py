"""Time of a step by formulas: compute, communication, its hidden part, and the published model."""

"""The time of a step by formulas: compute, communication, what of it is hidden, and the published model."""

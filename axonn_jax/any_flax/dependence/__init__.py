"""Dependence, read off a traced program: of a loss on the rows of a batch."""

"""Dependence, read off a traced program: of an optimizer's results on elements, of a loss on the rows of a batch."""

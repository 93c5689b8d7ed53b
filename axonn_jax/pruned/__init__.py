"""Pruned training (SAMO): masks, and weights of which only the kept entries are trained."""

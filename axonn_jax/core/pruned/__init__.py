"""Pruned training (SAMO): masks, and weights whose unmasked entries alone are trained."""

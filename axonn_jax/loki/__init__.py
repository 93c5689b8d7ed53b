"""Loki attention: which keys a decode step attends to, by their principal components, and what it is compared with."""

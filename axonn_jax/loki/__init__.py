"""Loki attention: choice of a decode step's keys by principal components, and the baselines."""

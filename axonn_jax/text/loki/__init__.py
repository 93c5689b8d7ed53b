"""Loki attention: selection of a decode step's keys by principal components."""

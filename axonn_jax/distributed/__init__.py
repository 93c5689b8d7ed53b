"""Processes of a run: who takes part, what they agree on, and who is gone."""

"""Costs of a run before it starts: time, memory and communication by formulas and in virtual time; its grid."""

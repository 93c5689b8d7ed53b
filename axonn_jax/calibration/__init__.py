"""Measurements of the machine that a process runs on, for the planner."""

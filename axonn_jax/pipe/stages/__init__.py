"""Pipeline: compiled stage programs, the host loop that runs them, and a rank's state."""

"""The pipeline: compiled stage programs, the host loop that runs them, and their measured timeline."""

"""Models and their sizes."""

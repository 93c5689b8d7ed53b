"""Core: models whose layers are split over a 4D mesh, their training, saving and loading."""

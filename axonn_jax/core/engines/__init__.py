"""Engine of a model that lies whole on one mesh: its programs, its state saved and loaded."""

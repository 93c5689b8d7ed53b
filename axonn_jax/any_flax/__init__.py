"""Any Flax model: made parallel, taken apart, and trained by the user's loss."""

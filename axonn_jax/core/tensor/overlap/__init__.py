"""An order of computation that hides communication."""

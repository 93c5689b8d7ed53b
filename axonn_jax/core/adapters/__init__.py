"""Low-rank adapters of a frozen model (LoRA): settings, layers, and the base they belong to."""

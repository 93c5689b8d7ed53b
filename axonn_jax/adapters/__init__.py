"""Low-rank adapters of a frozen model (LoRA): settings, layers, the base they belong to, and PEFT's files."""

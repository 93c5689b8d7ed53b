"""Low-rank adapters (LoRA) of a frozen model: settings, layers, their base, and PEFT's file format."""

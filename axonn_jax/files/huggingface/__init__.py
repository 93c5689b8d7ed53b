"""Hugging Face models: config.json and safetensors, loaded onto any grid and exported."""

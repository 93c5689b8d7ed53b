"""Hugging Face models: config.json and safetensors of transformers, read into any grid and written."""

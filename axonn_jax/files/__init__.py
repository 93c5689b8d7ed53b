"""Files of others: data prepared and read, Hugging Face's models, PEFT's adapters."""

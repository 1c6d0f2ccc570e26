"""Models: from config.json and weights to a model on a device, and back to Hugging Face files."""

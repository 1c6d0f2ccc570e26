"""From config.json and weights to modules on a device, and back to Hugging Face files."""

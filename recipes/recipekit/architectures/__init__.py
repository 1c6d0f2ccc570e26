"""Contents of a published model folder: config.json and its sizes, and weight file headers."""

"""What a run will need, before it runs."""

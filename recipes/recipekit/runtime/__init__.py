"""Everything around the training loop: preparation, rank checks, tracking, stopping and failure."""

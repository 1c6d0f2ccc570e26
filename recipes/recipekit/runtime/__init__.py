"""What surrounds the loop: preparing a run, agreeing, tracking, stopping and failing."""

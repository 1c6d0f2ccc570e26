"""What a run leaves on the disk, and its way into every other layout."""

"""What is known of the machines: their builds, compiled ops, links and limits."""

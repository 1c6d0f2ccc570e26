"""What a model learns: one file a task, named as the value of --task, and one row of facts."""

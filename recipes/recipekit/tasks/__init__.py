"""Training tasks: one file per task, named after its --task value, and one `TaskSpec` each."""

"""What changes a weight: parameter groups, schedules, and our repairs of DeepSpeed's step."""

"""Reading, checking and completing the DeepSpeed JSON, by facts and rules about its keys."""

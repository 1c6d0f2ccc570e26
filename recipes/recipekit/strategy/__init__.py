"""The DeepSpeed JSON: reading it, the facts and rules about its keys, checking it, and filling it in."""

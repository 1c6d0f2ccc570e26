"""The ground floor: the description of a run, in light modules that import only each other."""

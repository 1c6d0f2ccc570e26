"""The ground floor: what a run is, in light modules that import only each other."""

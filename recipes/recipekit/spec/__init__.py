"""The lowest layer: light modules that describe a run and import only each other."""

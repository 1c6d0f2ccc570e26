"""The tensor files of a checkpoint: their formats, and the location of each tensor's parts."""

"""The files that hold the tensors of a checkpoint: their formats, and where each part of a tensor
is.
"""

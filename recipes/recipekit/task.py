"""What every task shares: a micro-batch, and the label that does not count."""

import torch

MicroBatch = dict[str, torch.Tensor]


IGNORE = -100  # a label that carries no loss

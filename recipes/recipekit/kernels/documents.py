"""Where the packed documents of a micro-batch begin: what attention reads instead of a mask."""

import torch


def documents_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Counts the tokens before each document of (B, T) positions, and all of them: (documents + 1,)
    int32, rows one after another.
    """
    return documents_from(document_starts(position_ids))


def document_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Finds where documents begin, (B, T) bool: with a row, and where a position is not the one
    before it plus one.

    This is transformers' own rule (masking_utils.find_packed_sequence_indices).
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    return starts


def with_documents(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds "documents" to a micro-batch of packed rows."""
    return batch | {"documents": documents_of(batch["position_ids"])}


def with_starts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Adds "document_starts" to a micro-batch of packed rows, from which a mask is made."""
    return batch | {"document_starts": document_starts(batch["position_ids"])}


def documents_from(starts: torch.Tensor) -> torch.Tensor:
    """Like `documents_of`, of `document_starts`."""
    begun = starts.flatten().nonzero().flatten()
    return torch.cat([begun, begun.new_tensor([starts.numel()])]).int()


def for_layers(documents: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Makes of `documents_of` what the layers of a model get as their attention_mask: (1, 1, tokens
    of the longest document, documents + 1).

    transformers 5.22.2 hands a mask of four dimensions to the layers as it is
    (masking_utils._preprocess_mask_arguments). The third says how long the longest document is
    without asking the device, and repeats one memory (stride 0). `documents` are read here, so they
    should still lie on the CPU.
    """
    longest = int(documents.diff().max())
    return documents.to(device, non_blocking=True).expand(1, 1, longest, -1)

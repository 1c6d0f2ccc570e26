"""Boundaries of the documents in a micro-batch, which attention reads instead of a mask."""

import torch


def cu_seqlens_of(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the documents' cumulative token counts, given positions (B, T).

    The result is (documents + 1,) int32: the number of tokens before each document, and the total.
    Rows are counted as if concatenated.
    """
    return cu_seqlens_from(document_starts(position_ids))


def document_starts(position_ids: torch.Tensor) -> torch.Tensor:
    """Return the document starts, (B, T) bool.

    A document starts at each row's first token, and wherever a position is not the previous
    position plus one. transformers uses the same rule (masking_utils.find_packed_sequence_indices).
    """
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    return starts


def with_documents(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a micro-batch of packed rows with the entry "documents" added."""
    return batch | {"documents": cu_seqlens_of(batch["position_ids"])}


def with_document_starts(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return packed rows with "document_starts" added, for attention that creates a mask."""
    return batch | {"document_starts": document_starts(batch["position_ids"])}


def cu_seqlens_from(starts: torch.Tensor) -> torch.Tensor:
    """Return the same result as `cu_seqlens_of`, given `document_starts`."""
    begun = starts.flatten().nonzero().flatten()
    return torch.cat([begun, begun.new_tensor([starts.numel()])]).int()


def as_attention_mask(cu_seqlens: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return `cu_seqlens_of` in the form that layers receive as their attention_mask.

    The result has the shape (1, 1, tokens in the longest document, documents + 1), because
    transformers 5.22.2 passes a 4D mask to the layers unchanged
    (masking_utils._preprocess_mask_arguments). The third dimension is expanded with stride 0. It
    carries the length of the longest document without a device sync.

    This function reads the values of `cu_seqlens`, so the tensor should still be on the CPU.
    """
    longest = int(cu_seqlens.diff().max())
    return cu_seqlens.to(device, non_blocking=True).expand(1, 1, longest, -1)

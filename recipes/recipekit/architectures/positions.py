"""The range of positions on which a model was trained, from its config.json."""

from collections.abc import Iterator
from typing import Any


def beyond_positions(model_config: dict[str, Any], seq_len: int) -> list[str]:
    """Return a line if rows of `seq_len` tokens exceed the positions in config.json, otherwise [].

    Rotary positions and ALiBi can be computed for any length. The line names a scaling, if there is
    one, and the length that it supports.
    """
    text = model_config.get("text_config")
    config = model_config | text if isinstance(text, dict) else model_config
    most = config.get("max_position_embeddings")
    if type(most) is not int or seq_len <= most:
        return []
    line = (
        f"seq_len: rows of {seq_len} tokens exceed max_position_embeddings = {most} in the model's"
        " config.json"
    )
    if not (scalings := list(_scalings(config, most))):
        return [f"{line}: the model was not trained on later positions"]
    return [f"{line}; {', '.join(scalings)}"]


def _scalings(config: dict[str, Any], most: int) -> Iterator[str]:
    """Yield a text for each scaling of rotary positions.

    Some models have a separate scaling for each type of layer.
    """
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(rope, dict):
        return
    for name, own in {
        "": rope,
        **{name: own for name, own in rope.items() if isinstance(own, dict)},
    }.items():
        kind, factor = own.get("rope_type") or own.get("type"), own.get("factor")
        if isinstance(kind, str) and kind != "default" and isinstance(factor, int | float):
            key = "original_max_position_embeddings"
            original = own.get(key) or config.get(key) or most
            of_layers = f" of {name}" if name else ""
            yield (
                f"{kind} scaling{of_layers} by {factor} reaches {int(factor * original)} from"
                f" {original}"
            )

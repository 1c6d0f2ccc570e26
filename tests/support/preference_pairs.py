"""A file of preference pairs."""

import functools
import json
import random
import tempfile
from pathlib import Path


@functools.cache
def pairs() -> str:
    """Write pairs in every format, with answers of 1 to 60 letters.

    The micro-batches therefore have different lengths.
    """
    draw = random.Random(0)

    def text(longest):
        return "".join(draw.choice("abcdefgh ") for _ in range(draw.randint(1, longest)))

    rows = []
    for number in range(1200):
        question, chosen, rejected = text(30), text(60), f"{text(59)}."
        said = [[{"role": "assistant", "content": answer}] for answer in (chosen, rejected)]
        asked = [{"role": "user", "content": question[:20]}]
        forms = (
            (question, chosen, rejected),
            (asked, said[0][:1], said[1][:1]),
            (question[:20], asked + said[0], asked + said[1]),
        )
        rows.append(dict(zip(("prompt", "chosen", "rejected"), forms[number % 3], strict=True)))
    file = Path(tempfile.mkdtemp(prefix="pairs_")) / "pairs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)

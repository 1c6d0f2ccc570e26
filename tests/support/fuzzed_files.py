"""An unlimited number of broken DeepSpeed files: mutations of the cases in lint_cases.py. They are
the same in every run.
"""

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from lint_cases import CASES

VALUES: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        0.5,
        -0.0,
        1e9,
        5e-324,
        10**40,
        -(10**40),
        10**400,
        1e400,
        -1e400,
        float("nan"),
    ),
    *(
        "",
        "auto",
        "AUTO",
        "true",
        "5e8",
        "1e-3",
        "none",
        "cpu",
        "nvme",
        "\u202e",
        "\ud800",
        "a" * 5000,
        "\x00",
        "Infinity",
    ),
    *(
        [],
        [[]],
        {},
        {"": {}},
        {"enabled": {"enabled": True}},
        [None],
        [True, "x"],
        [1, 2, 3],
        ["0.9"],
        [{}],
        {"type": None},
        {"stage": [3]},
    ),
]
PIECES = (
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    '"',
    "'",
    "'''",
    "//",
    "/*",
    "*/",
    "#",
    "\\",
    "\\u",
    "\n",
    "\r",
    "\t",
    "\x00",
    "\ufeff",
    "NaN",
    "-Infinity",
    "1e999",
    "0x1",
    "é",
    "🙂",
    "١",
)


def fuzzed_files(count: int, seed: int = 43) -> Iterator[bytes]:
    """Yield `count` files."""
    draw = random.Random(seed)
    cases = list(CASES.values())
    for _ in range(count):
        case = draw.choice(cases)
        if draw.random() < 0.6 and not isinstance(case.config, str):
            config = copy.deepcopy(case.config)
            for _ in range(draw.randint(1, 4)):
                _change(config, draw)
            content = json.dumps(config, indent=draw.choice([None, 1])).encode(
                "utf-8", "surrogatepass"
            )
        else:
            content = case.text.encode()
        if draw.random() < 0.5:
            content = _cut(content, draw)
        yield content


def _change(config: dict[str, Any], draw: random.Random) -> None:
    """Change one value, key or block somewhere in a configuration."""
    blocks = [config]
    for block in blocks:
        blocks += [value for value in block.values() if isinstance(value, dict)]
    block = draw.choice(blocks)
    key = draw.choice(list(block) or ["stage"])
    what = draw.randrange(8)
    if what == 0:
        block.pop(key, None)
    elif what == 1:
        block[key + draw.choice(["s", "_", " ", "\u0301", "é"])] = block.pop(key, None)
    elif what == 2:
        block[key] = {key: block.get(key)}
    elif what == 3:
        block[key] = [block.get(key)]
    elif what == 4:
        other = draw.choice(blocks)
        block[key] = copy.deepcopy(other) if other is not config else draw.choice(VALUES)
    elif what == 5:
        block[key] = str(block.get(key))
    elif what == 6:
        donor = draw.choice(
            [case.config for case in CASES.values() if isinstance(case.config, dict)]
        )
        block.update(copy.deepcopy(donor))
    else:
        block[key] = draw.choice(VALUES)


def _cut(content: bytes, draw: random.Random) -> bytes:
    """Truncate, repeat, nest or overwrite bytes of a file."""
    start = draw.randint(0, len(content))
    end = min(len(content), start + draw.randint(0, 30))
    what = draw.randrange(8)
    if what == 0:
        return content[:start]
    if what == 1:
        return content[:start] + content[end:]
    if what == 2:
        return content[:start] + content[start:end] * 2 + content[end:]
    if what == 3:
        return content[:start] + draw.choice(PIECES).encode() + content[start:]
    if what == 4:
        return content[:start] + draw.randbytes(draw.randint(1, 5)) + content[end:]
    if what == 5:
        return content.decode("utf-8", "replace").encode(
            draw.choice(["utf-16", "utf-16-le", "utf-8-sig", "utf-32"])
        )
    if what == 6:
        depth = draw.choice([3, 500, 100_000])
        return b'{"zero_optimization": ' * depth + content + b"}" * draw.choice([0, depth])
    return content[:start] + b"9" * draw.choice([30, 5000]) + content[end:]

"""Arbitrary words of a command line."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# Words contain no NUL, because an argument cannot. They often contain characters that a shell or a
# template interprets.
PLAIN = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=4)
LIVE = st.sampled_from(
    [
        "$",
        "$$",
        "$(id)",
        "$(",
        "${local_rank}",
        "$local_rank",
        "`id`",
        "'",
        '"',
        "\\",
        "\n",
        "\t",
        " ",
        ";",
        "&",
        "|",
        "*",
        "~",
        "#",
        "%j",
        "-",
        "--",
        "=",
    ]
)
WORD = st.lists(st.one_of(LIVE, PLAIN), max_size=8).map("".join)
BYTES = "a\udcffb"  # a byte that is not text
NASTY = [
    "",
    "two words",
    "'\"",
    "$(touch here)",
    "`id`",
    "a\nb",
    "\\",
    "--nodes",
    "-x",
    "é\u2028😀",
    "$HOME",
    "$$",
    "${local_rank}",
    "%j",
    "*",
    "--",
    "--out",
    "~",
]
QUICK = settings(
    max_examples=500,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
    database=None,
)


def arbitrary_words(count: int = 200) -> list[str]:
    """Return as many words as one real launch takes; difficult words come first."""
    found: list[str] = []

    @settings(QUICK, max_examples=count, derandomize=True)
    @given(WORD)
    def collect(word: str) -> None:
        found.append(word)

    collect()
    return [*NASTY, *found, "--"]


def expanded(text: str) -> str:
    """Expand a word as the kubelet does if no variable has the name.

    Source: k8s.io/kubernetes/third_party/forked/golang/expansion.
    """
    out, index = "", 0
    while index < len(text):
        following = text[index + 1 : index + 2]
        if text[index] == "$" and following == "$":
            out, index = out + "$", index + 2
        else:
            out, index = out + text[index], index + 1
    return out

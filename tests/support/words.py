"""Arbitrary words of a command line."""

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

# No NUL, which no argument can hold; often what a shell or a template reads
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
BYTES = "a\udcffb"  # a byte that is no text
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
    """As many as one real launch takes, the nasty ones first."""
    found: list[str] = []

    @settings(QUICK, max_examples=count, derandomize=True)
    @given(WORD)
    def collect(word: str) -> None:
        found.append(word)

    collect()
    return [*NASTY, *found, "--"]

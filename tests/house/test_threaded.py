"""tests/support/threaded.py: its results for small packages, and a limit for recipekit."""

from pathlib import Path
from textwrap import dedent

import pytest
from pool import ROOT
from threaded import threads

TODAY = 0  # 9 on the morning of 2026-11-24; threaded.py lists them
END = "def read(x): return x + 1"


def found(folder: Path, **modules: str) -> list[str]:
    """Return the paths in a package of these modules."""
    for name, text in modules.items():
        path = folder.joinpath(*name.split("__")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    return [
        f"{thread.name}: {' > '.join(thread.functions)}".replace("recipekit.", "")
        for thread in threads(folder)
    ]


def test_no_more_parameters_are_threaded_than_today() -> None:
    now = threads(ROOT / "recipes" / "recipekit")
    assert len(now) <= TODAY, "\n".join(map(str, now))


def chain(*bodies: str) -> str:
    """Return a module in which `make` passes a value to f0; the bodies belong to f0, f1, ..."""
    return "\n".join(
        [
            "def make(): return f0(object())",
            END,
            *(f"def f{number}(x): {body}" for number, body in enumerate(bodies)),
        ]
    )


@pytest.mark.parametrize(
    ("bodies", "ways"),
    [
        (
            ("return f1(x)", "return f2(x)", "return f3(x)", "return read(x)"),
            ["x: a.f0 > a.f1 > a.f2 > a.f3"],
        ),
        (("return f1(x)", "return f2(x)", "return read(x)"), []),
        # f1 reads it
        (("return f1(x)", "return f2(x) if x else 0", "return f3(x)", "return read(x)"), []),
        (
            (
                "return f1(x)",
                "return f2(x) if x else 0",
                "return f3(x)",
                "return f4(x)",
                "return read(x)",
            ),
            ["x: a.f0 > a.f2 > a.f3 > a.f4"],
        ),
        (("return f1(x)", "return f2(x)", "return f3(x)", "x = read(x)"), []),  # f3 sets it
        # in another package
        (("return f1(x)", "return f2(x)", "return f3(x)", "return len(x)"), []),
        # another value from f1 on
        (("return f1(x)", "return f2(x.part)", "return f3(x)", "return read(x)"), []),
        (("return f1(x)", "return f2(x)", "return f3([x])", "return read(x)"), []),
        (
            ("return f1(x=x)", "return f2(x=x)", "return f3(x=x)", "return read(x=x)"),
            ["x: a.f0 > a.f1 > a.f2 > a.f3"],
        ),
        # in a circle
        (
            ("return f1(x)", "return f2(x)", "return f3(x)", "return f0(x)"),
            ["x: a.f0 > a.f1 > a.f2 > a.f3"],
        ),
        (
            (
                "return [f1(x) for _ in 'ab']",
                "return f2(x)",
                "return lambda: f3(x)",
                "return f'{read(x)}'",
            ),
            ["x: a.f0 > a.f1 > a.f2 > a.f3"],
        ),
        (("return f1(x)", "return f2(x)", "return f3(x)", "return f'{x}'"), []),
    ],
)
def test_a_way_of_four_functions_that_do_not_read_the_value_is_found(
    tmp_path: Path, bodies: tuple[str, ...], ways: list[str]
) -> None:
    assert found(tmp_path, a=chain(*bodies)) == ways


def test_a_way_leads_through_names_modules_partial_classes_and_closures(tmp_path: Path) -> None:
    ways = found(
        tmp_path,
        __init__="from .wing import first",
        wing____init__="from .a import first",
        wing__a="""
            from functools import partial
            from .. import b

            def first(size, other): return partial(b.second, other, length=size)
            """,
        b="""
            from .c import Kept, third as renamed

            def second(other, *, length):
                def inside():
                    return renamed(length)
                return inside() + other
            """,
        c="""
            class Kept:
                def __init__(self, width):
                    self.width = width

                def made(self, high, width):
                    return self.other(width) * high

                def other(self, deep):
                    return Kept(deep)

            def third(width):
                kept = Kept(1)
                return kept.made(2, width)
            """,
        d="from . import first\ndef give(recipe): return first(recipe.size, 1)",
    )
    assert ways == ["size: wing.a.first > b.second > c.third > c.Kept.made > c.Kept.other"]


def test_the_longest_way_of_a_value_stands_for_its_others(tmp_path: Path) -> None:
    text = chain(
        "return f1(x) + f3(x)", "return f2(x)", "return f3(x)", "return f4(x)", "return read(x)"
    )
    assert found(tmp_path, a=f"{text}\ndef second(): return f1(object())") == [
        "x: a.f0 > a.f1 > a.f2 > a.f3 > a.f4"
    ]

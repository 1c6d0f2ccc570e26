"""Refuses a job that cannot be started: prints every problem at once, each with its fix."""


class Refused(ValueError):
    """Says that the input is at fault; `problems` are whole sentences: value, rule, fix."""

    def __init__(self, *problems: str):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__("\n".join([f"refused: {count}", *(f"  {number}. {problem}" for number, problem in enumerate(problems, 1))]))
        self.problems = problems

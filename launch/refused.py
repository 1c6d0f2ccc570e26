"""Refuses a job that cannot be started: prints every problem at once, each with its fix."""

# exit code after a fault from outside (a lost rank or host, a failing disk), as in
# recipekit/spec/refusal.py
START_AGAIN = 75


class Refused(ValueError):
    """Says that the input is at fault; `problems` are sentences: `WHERE: rule. Fix`.

    `code` is the exit code: 1, or START_AGAIN if the same command may succeed later.
    """

    def __init__(self, *problems: str, code: int = 1):
        count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
        super().__init__(
            "\n".join(
                [
                    f"refused: {count}",
                    *(f"  {number}. {problem}" for number, problem in enumerate(problems, 1)),
                ]
            )
        )
        self.problems = problems
        self.code = code

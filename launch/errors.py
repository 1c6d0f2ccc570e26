"""Rejection of a job that cannot be started. It lists every problem at once, each with its fix."""

# Exit code after a fault from outside (a lost rank or host, a failing disk), the same as in
# recipekit/spec/errors.py.
START_AGAIN = 75


class LaunchError(ValueError):
    """An error in the user's input. Each of the `problems` has the form `WHERE: rule. Fix`.

    `code` is the exit code. It is 1, or START_AGAIN if the same command may succeed later.
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

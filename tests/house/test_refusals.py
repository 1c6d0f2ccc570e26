"""The format of each config error: `WHERE: rule. Fix`.

No text may follow the fix, because it would be copied together with a command.
"""

import pytest
from recipekit.spec.errors import Problem, config_error, sentences


@pytest.mark.parametrize(
    ("rule", "fix", "said"),
    [
        ("must be positive", "use --lr 1e-4", "must be positive. Use --lr 1e-4"),
        ("is not a flag", "did you mean --lr?", "is not a flag. Did you mean --lr?"),
        ("is in use", "choose another: --port 1", "is in use. Choose another: --port 1"),
        ("Is this a file?", "fetch it", "Is this a file? Fetch it"),
        ("is lost.", "fetch it", "is lost. Fetch it"),
        ("is unset", "--lr 1e-4 sets it", "is unset. --lr 1e-4 sets it"),
        ("is unset", '"auto" sets it', 'is unset. "auto" sets it'),
        ("is unset", "recipes/NAME.py sets it", "is unset. recipes/NAME.py sets it"),
        ("is unset", "bf16.enabled sets it", "is unset. bf16.enabled sets it"),
    ],
)
def test_a_refusal_is_where_rule_and_fix(rule: str, fix: str, said: str) -> None:
    problem = Problem("lr = 0", rule, fix)
    assert str(problem) == f"lr = 0: {said}" and problem.fault == f"lr = 0: {rule}"
    assert str(config_error("lr = 0", rule, fix)) == str(problem) and sentences(rule, fix) == said

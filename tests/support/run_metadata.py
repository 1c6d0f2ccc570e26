"""Metadata of a run, for tests that do not start a run."""

FACTS = {
    "recipe": {"name": "mine", "steps": 9, "task": "pretrain", "model": "org/base", "merge": False},
    "identity": {},
    "mesh": {"world": 1, "name": "dp1"},
}

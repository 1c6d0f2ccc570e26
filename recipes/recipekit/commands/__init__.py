"""Subcommands of `recipekit`.

Each subcommand is one module with a function `main(argv)` that returns the exit code.
"""

"""The subcommands of `recipekit`, one module each with `main(argv)`, which returns the exit
code.
"""

"""`python -m launch`: where am I x who forks the ranks -> one command, printed, then run. Standard library only."""

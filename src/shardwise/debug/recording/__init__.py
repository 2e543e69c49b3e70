"""The recorder of operators and collectives, its records, and the user's line and module of each."""

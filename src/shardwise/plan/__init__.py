"""Pure decisions: which steps carry a tensor from one layout to another, and which layout an operator runs in."""

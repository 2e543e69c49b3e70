"""Measurements. Each module with a `main()` is one; `python -m bench [name ...]` runs them."""

"""The report of `explain`: sums, advice, and its formats (text, JSON, HTML, Chrome trace)."""

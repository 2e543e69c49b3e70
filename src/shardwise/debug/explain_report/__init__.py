"""What `explain` gives: sums, advice, and the report as text, JSON, HTML, Chrome trace."""

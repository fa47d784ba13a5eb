"""One self-contained HTML page for several runs: what `shoal sim compare --report` writes."""

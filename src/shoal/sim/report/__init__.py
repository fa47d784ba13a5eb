"""The report of `shoal sim compare --report`: one self-contained HTML page for several runs."""

"""Shoal within other tools. Each module needs the extra of its name and is imported only when it is used."""

"""The database: tables, transactions and migrations."""

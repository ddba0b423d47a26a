"""Rows of the table, a module a kind of operation."""

"""A report of fits as one HTML file: facts are collected, and rendered as text, tables and figures."""

"""Commands that showed why something was built as it is; see README.md beside this file."""

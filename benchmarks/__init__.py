"""Commands that back what README.md and docs/ claim, and the parts that they share."""

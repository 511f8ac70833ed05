"""Filters that decide, group by group, what is worth training on."""

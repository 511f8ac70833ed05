"""Checks a run before any process starts; begin reading with all_checks.py."""

"""What can be known before any process starts; begin with all_checks.py."""

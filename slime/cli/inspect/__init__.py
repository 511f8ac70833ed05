"""Commands about a run that exists: they read its record, live or after its end."""

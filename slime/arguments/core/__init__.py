"""How flags are declared, parsed, layered, shown and frozen; nothing here knows a particular flag."""

"""Declares, parses, layers, shows and freezes flags; nothing here knows a particular flag."""

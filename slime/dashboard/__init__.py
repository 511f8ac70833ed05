"""The page: shows runs in a browser, live or after their end, from what lies in their folders."""

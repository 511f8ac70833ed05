"""The dashboard: shows runs in a browser, live or after they ended, from the files in their folders."""

"""What a person sees of a run: lines that are redrawn in place, and where everything else goes."""

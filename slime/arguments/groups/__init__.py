"""The flags, a file per subject: declarations, when each has an effect, and rules that span several."""

"""The flags, one file per subject: declarations, conditions for their effects, and rules between flags."""

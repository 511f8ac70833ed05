"""The flags, a group per subject, and the rules about them."""

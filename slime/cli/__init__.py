"""The `slime` command: one subcommand per module, loaded only when it is used."""

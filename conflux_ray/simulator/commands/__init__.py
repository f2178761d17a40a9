"""The subcommands `conflux simulate`, `goodput`, `figures` and `plan`."""
